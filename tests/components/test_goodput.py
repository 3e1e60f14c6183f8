"""Goodput of runs with known histories, and reading and continuing `events.jsonl`."""

import json

import pytest

from torchtitan.components.goodput import describe_goodput, goodput
from torchtitan.components.run_events import EVENTS, EventLog, events_in, read_json_lines


def start(time, step, begun, start_up):
    return {"event": "start", "time": time, "step": step, "begun": begun, "seconds": {"start-up": start_up}}


def progress(time, step, **seconds):
    return {"event": "progress", "time": time, "step": step, "seconds": seconds}


KILLED_TWICE = [
    start(110, 0, 100, 10.0),
    progress(130, 10, **{"start-up": 10.0, "data": 1.0, "forward": 6.0, "backward": 10.0, "save": 3.0}),
    progress(150, 20, **{"start-up": 10.0, "data": 2.0, "forward": 15.0, "backward": 20.0, "save": 3.0}),
    # Killed after step 20 or later. Resumes from step 14, 30 seconds after the last sign of life.
    start(190, 14, 180, 10.0),
    progress(200, 20, **{"start-up": 11.0, "forward": 9.0}),
    # Killed. Resumes from step 10, before the first session's end.
    start(225, 10, 220, 5.0),
    {"event": "straggler", "time": 230, "step": 15, "rank": 1},
    progress(245, 20, **{"start-up": 5.0, "forward": 16.0, "between steps": 1.0, "validation": 3.0}),
    {"event": "end", "time": 246, "step": 20, "seconds": {"start-up": 5.0, "forward": 16.0, "validation": 3.0}},
]


def test_run_that_was_killed_twice():
    parts = goodput(KILLED_TWICE)
    assert parts == pytest.approx(
        {
            "training": 16 + 16,  # ten steps of the first session, and the last session
            "lost steps": 19 + 9,  # steps 11 to 20 of the first session, and the whole second one
            "restart": 30 + 11 + 20 + 5,
            "start-up": 10,
            "data": 2,
            "save": 3,
            "validation": 3,
            "other": 2,
        }
    )
    assert sum(parts.values()) == pytest.approx(246 - 100)  # nothing is left out or counted twice
    assert "goodput 21.9% of 0:02:26; restart 45.2%, lost steps 19.2%" in describe_goodput(parts)


def test_part_of_an_interval_is_lost():
    """Training time grows by 19 s from step 10 to 20; a later session repeats it from step 12."""
    parts = goodput([*KILLED_TWICE[:3], start(190, 12, 180, 10.0)])
    assert parts["lost steps"] == pytest.approx(19 * 0.8)
    assert parts["training"] == pytest.approx(16 + 19 * 0.2)


def test_nothing_is_lost_without_a_restart():
    assert goodput(KILLED_TWICE[:3]) == {"training": 35.0, "start-up": 10.0, "save": 3.0, "data": 2.0}
    returned = progress(160, 22, **{**KILLED_TWICE[2]["seconds"], "return to a checkpoint": 9.0})
    assert goodput([*KILLED_TWICE[:3], returned]) == {**goodput(KILLED_TWICE[:3]), "restart": 9.0, "other": 1.0}
    assert goodput([]) == {} and describe_goodput({"start-up": 2.0}) == "goodput 0.0% of 0:00:02; start-up 100.0%"


def test_killed_run_continues_its_events(tmp_path):
    def session(step, *, ended=False, command="train"):
        log = EventLog(tmp_path, step, command)
        log.write("start", step, begun=1.0, seconds={}, command=command)
        if ended:
            log.write("end", step + 1, reason="completed", seconds={})
        log.close()
        return len(events_in(tmp_path))

    assert session(0) == 1
    with open(tmp_path / EVENTS, "a") as file:
        file.write('{"event": "progr')  # the process was killed while it wrote
    assert session(0) == 2  # killed before its first checkpoint
    assert read_json_lines(tmp_path / EVENTS, bool)[1] == [2]
    assert session(7, ended=True) == 4
    assert session(8, ended=True) == 6  # extended
    assert session(0) == 1  # a fresh run
    assert len(read_json_lines(tmp_path / "events-1.jsonl", bool)[0]) == 6
    assert session(0, command="train --other") == 1 and (tmp_path / "events-2.jsonl").exists()


def test_lines_that_are_no_events_are_left_out(tmp_path):
    good = start(2.0, 0, 1.0, 1.0)
    bad = [{"event": "progress", "time": 3.0, "step": 1, "seconds": {"data": "1"}}, {"event": 1}, [], {}, {"time": 1}]
    bad += [{**good, "seconds": 3}, {**good, "begun": None}, {**good, "step": True}]
    (tmp_path / EVENTS).write_text(
        "\n".join(map(json.dumps, [progress(1.0, 1), *bad, good, *bad])) + '\n{"a": [[\n\xff'
    )
    assert events_in(tmp_path) == [good]

"""Goodput of runs with known histories, and reading and continuing `events.jsonl`."""

import json

import pytest

from torchtitan.components.observe import run_events
from torchtitan.components.observe.run_events import (
    EVENTS,
    describe_goodput,
    goodput,
    mean_phases,
    open_events,
    read_events,
    shares,
)
from torchtitan.tools.files import json_lines


def start(time, step, begun, start_up):
    return {
        "event": "start",
        "time": time,
        "step": step,
        "begun": begun,
        "seconds": {"start-up": start_up},
    }


def progress(time, step, **seconds):
    return {"event": "progress", "time": time, "step": step, "seconds": seconds}


KILLED_TWICE = [
    start(110, 0, 100, 10.0),
    progress(
        130, 10, **{"start-up": 10.0, "data": 1.0, "forward": 6.0, "backward": 10.0, "save": 3.0}
    ),
    progress(
        150, 20, **{"start-up": 10.0, "data": 2.0, "forward": 15.0, "backward": 20.0, "save": 3.0}
    ),
    # Killed after step 20 or later. Resumes from step 14, 30 seconds after the last sign of life.
    start(190, 14, 180, 10.0),
    progress(200, 20, **{"start-up": 11.0, "forward": 9.0}),
    # Killed. Resumes from step 10, before the first session's end.
    start(225, 10, 220, 5.0),
    {
        "event": "straggler",
        "time": 230,
        "step": 15,
        "rank": 1,
        "seconds": {"start-up": 5.0, "forward": 8.0},
    },
    progress(
        245, 20, **{"start-up": 5.0, "forward": 16.0, "between steps": 1.0, "validation": 3.0}
    ),
    {
        "event": "end",
        "time": 246,
        "step": 20,
        "seconds": {"start-up": 5.0, "forward": 16.0, "validation": 3.0},
    },
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
    assert sum(parts.values()) == pytest.approx(246 - 100)  # nothing is missed or counted twice
    assert "21.9% of 0:02:26; restart 45.2%, lost steps 19.2%" in describe_goodput(parts)


def test_part_of_an_interval_is_lost():
    """Training time grows by 19 s from step 10 to 20; a later session repeats it from step 12."""
    parts = goodput([*KILLED_TWICE[:3], start(190, 12, 180, 10.0)])
    assert parts["lost steps"] == pytest.approx(19 * 0.8)
    assert parts["training"] == pytest.approx(16 + 19 * 0.2)


def returned(time, step, to, **seconds):
    return {"event": "returned", "time": time, "step": step, "to": to, "seconds": seconds}


def test_undone_steps_are_lost():
    """A return at step 20 to the weights of step 5 undoes steps 6 to 20, also in other sessions;
    steps after it stay. A session that resumes from a checkpoint before the return undoes the
    return too."""
    before = KILLED_TWICE[:3]  # trains 16 s up to step 10, and 35 s up to step 20
    resumed = [start(160, 20, 150, 10.0), progress(170, 25, **{"start-up": 10.0, "forward": 10.0})]
    at_once = [returned(152, 20, 5, **{**before[2]["seconds"], "return to a checkpoint": 2.0})]
    after = [progress(162, 30, **{**at_once[0]["seconds"], "forward": 25.0})]
    parts = goodput([*before, *at_once, *after])
    assert parts["lost steps"] == pytest.approx(19 + 16 / 2) and parts["training"] == pytest.approx(
        16 / 2 + 10
    )
    assert parts["restart"] == 2.0
    # 3 s since the last event
    between = [returned(158, 24, 18, **{**before[2]["seconds"], "forward": 18.0})]
    parts = goodput([*before, *between])
    assert parts["lost steps"] == pytest.approx(3 + 19 * 0.2) and parts[
        "training"
    ] == pytest.approx(16 + 19 * 0.8)
    between[0]["to"] = 22  # of steps 21 to 24, half are undone
    parts = goodput([*before, *between])
    assert parts["lost steps"] == pytest.approx(1.5) and parts["training"] == pytest.approx(
        35 + 1.5
    )
    later = [returned(171, 25, 5, **resumed[1]["seconds"])]
    parts = goodput([*before, *resumed, *later])
    assert parts["lost steps"] == pytest.approx(19 + 16 / 2 + 10) and parts[
        "training"
    ] == pytest.approx(16 / 2)
    parts = goodput([*before, *at_once, *after, start(180, 10, 170, 10.0)])
    assert parts["lost steps"] == pytest.approx(19 + 10) and parts["training"] == pytest.approx(16)


def test_mean_step_leaves_out_the_first_one():
    assert mean_phases(KILLED_TWICE[:3]) == {"data": 0.1, "forward": 0.9, "backward": 1.0}
    assert mean_phases(KILLED_TWICE[:5]) == mean_phases([]) == {}
    assert shares({"data": 0.25, "forward": 1.75}) == {
        "data": "250.0 ms (12.5%)",
        "forward": "1,750.0 ms (87.5%)",
    }


def test_nothing_is_lost_without_a_restart():
    assert goodput(KILLED_TWICE[:3]) == {
        "training": 35.0,
        "start-up": 10.0,
        "save": 3.0,
        "data": 2.0,
    }
    assert (
        goodput([]) == {}
        and describe_goodput({"start-up": 2.0}) == "0.0% of 0:00:02; start-up 100.0%"
    )


def test_killed_run_continues_its_events(tmp_path):
    def session(step, *, ended=False, command="train"):
        log = open_events(tmp_path, step, command)
        log.append(
            {
                "event": "start",
                "time": 1.0,
                "step": step,
                "begun": 1.0,
                "seconds": {},
                "command": command,
            }
        )
        if ended:
            log.append(
                {
                    "event": "end",
                    "time": 1.0,
                    "step": step + 1,
                    "reason": "completed",
                    "seconds": {},
                }
            )
        log.close()
        return len(read_events(tmp_path))

    assert session(0) == 1
    with open(tmp_path / EVENTS, "a") as file:
        file.write('{"event": "progr')  # the process was killed while it wrote
    assert session(0) == 2  # killed before its first checkpoint
    broken = []
    assert [*json_lines(tmp_path / EVENTS, bool, broken)] and broken == []
    assert session(7, ended=True) == 4
    assert session(8, ended=True) == 6  # extended
    assert session(0) == 1  # a fresh run
    assert len([*json_lines(tmp_path / "events-1.jsonl", bool, broken)]) == 6 and broken == []
    assert session(0, command="train --other") == 1 and (tmp_path / "events-2.jsonl").exists()


def test_of_many_events_of_progress_some_are_left_out(tmp_path, monkeypatch):
    """The times of done and of lost steps stay the same."""
    monkeypatch.setattr(run_events, "_MOST_PROGRESS", 8)

    def session(first, n_steps):
        steps = range(first + 1, first + n_steps + 1)
        yield start(float(first), first, float(first), 0.5)
        for step in steps:
            yield progress(float(step), step, forward=float(step - first))
        yield {**progress(steps[-1] + 0.5, steps[-1], forward=float(n_steps)), "event": "save"}

    events = [*session(0, 40), *session(40, 3), *session(41, 2), *session(43, 100)]
    (tmp_path / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in events))
    read = read_events(tmp_path)
    assert goodput(read) == goodput(events) and len(read) < 40 < len(events)
    assert [e for e in read if e["event"] != "progress"] == [
        e for e in events if e["event"] != "progress"
    ]


def test_lines_that_are_no_events_are_left_out(tmp_path):
    good = start(2.0, 0, 1.0, 1.0)
    bad = [
        {"event": "progress", "time": 3.0, "step": 1, "seconds": {"data": "1"}},
        {"event": 1},
        [],
        {},
        {"time": 1},
    ]
    bad += [
        {**good, "event": "returned"},
        {**good, "seconds": 3},
        {**good, "begun": None},
        {**good, "step": True},
    ]
    (tmp_path / EVENTS).write_text(
        "\n".join(map(json.dumps, [progress(1.0, 1), *bad, good, *bad])) + '\n{"a": [[\n\xff'
    )
    assert read_events(tmp_path) == [good]

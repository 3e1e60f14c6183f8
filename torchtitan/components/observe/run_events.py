"""`events.jsonl` records the events of a run over all its sessions, and how it spends its time
(docs/report.md)."""

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchtitan.components.observe.metric_sinks import JsonLines
from torchtitan.tools.files import json_lines

EVENTS = "events.jsonl"

Event = Mapping[str, Any]
"""`event` (its kind), `time` (seconds since the epoch), `step`, `seconds` in each phase of the
session so far, and the values of its kind."""

_TYPES: dict[str, type] = {"event": str, "time": float, "step": int, "seconds": dict}
_TYPES_OF_KIND = {"start": _TYPES | {"begun": float}, "returned": _TYPES | {"to": int}}
_PLAIN_OF_KIND = {"start": ("data", "environment")}
"""Kind → its values that are objects, if present."""

_MOST = {"time": 2.0**33, "begun": 2.0**33, "step": 2**63, "to": 2**63}
"""Key → its limit: the year 2242, and the largest step of a tensor."""

_MOST_PROGRESS = 50_000
"""Events of progress in memory: about 100 MB."""

_MOST_SECONDS = 1e9
"""Limit of the time in a phase: 30 years."""

_PARTS = {name: name for name in ("start-up", "data", "validation", "save")}
_PARTS |= {"export": "save", "between steps": "other", "return to a checkpoint": "restart"}
"""Phase → part of the run's time; all other phases are parts of a step, and are training."""


def open_events(folder: Path, step: int, command: str) -> JsonLines:
    """Open the file of a run to append events after `step`. At step 0, an earlier run's file is
    moved aside, unless that run had the same command and did not end, as after a crash before the
    first checkpoint."""
    events = read_events(folder)
    commands = [event.get("command") for event in events if event["event"] == "start"]
    continues = step > 0 or commands[-1:] == [command] and events[-1]["event"] != "end"
    return JsonLines(folder / EVENTS, math.inf if continues else 0)


def read_events(folder: Path, broken: list[int] | None = None) -> list[Event]:
    """Return the events of a run's folder in order, from the first start on; empty without a file.
    Skip some events of progress beyond `_MOST_PROGRESS`, which changes only the time of lost
    steps slightly. Append the numbers of broken lines to `broken`."""
    lines = json_lines(folder / EVENTS, _is_event, [] if broken is None else broken)
    events: list[Event] = []
    n_progress, most = 0, _MOST_PROGRESS
    for event in itertools.dropwhile(lambda event: event["event"] != "start", lines):
        # Equal keys are one string in memory.
        seconds = {sys.intern(phase): time for phase, time in event["seconds"].items()}
        events.append({**event, "seconds": seconds})
        n_progress += event["event"] == "progress"
        if n_progress > most:
            events = _thinned(events)
            n_progress = sum(event["event"] == "progress" for event in events)
            # Few can be skipped if other events are between them.
            most = max(_MOST_PROGRESS, n_progress * 3 // 2)
    return events


def _thinned(events: Sequence[Event]) -> list[Event]:
    """Return the events without every other one of progress, except before and after events of
    other kinds, which tell how far a session came, and when it began to be measured."""
    kept, is_second = [*events[:1]], False
    for event, after in itertools.pairwise([*events[1:], {"event": ""}]):
        is_between = kept[-1]["event"] == event["event"] == after["event"] == "progress"
        is_second = is_between and not is_second
        if not is_second:
            kept.append(event)
    return kept


def _is_event(line: Event) -> bool:
    types = _TYPES_OF_KIND.get(str(line.get("event")), _TYPES)
    for name, expected in types.items():
        if type(line.get(name)) is not expected:
            return False
        if name in _MOST and not 0 <= line[name] < _MOST[name]:
            return False
    objects = [line.get(name, {}) for name in _PLAIN_OF_KIND.get(line["event"], ())]
    if not all(isinstance(value, dict) for value in objects):
        return False
    times = line["seconds"].values()
    if not times:
        return True
    return {*map(type, times)} == {float} and all(0 <= time < _MOST_SECONDS for time in times)


def goodput(events: Sequence[Event]) -> dict[str, float]:
    """Return the time of a run in seconds by part, largest first; none without events. "training"
    advanced the run; the parts (docs/report.md) add up to the time from the first start to the last
    event.

    A session is known up to its last event: the time from there to the first step of the next one
    is "restart", also if the session was killed between two events. Steps are lost if a later
    session starts before them, or the run returns to an earlier checkpoint; the time between two
    events is divided by their steps.
    """
    parts: dict[str, float] = defaultdict(float)
    kept = math.inf  # the last step that later events do not undo
    for before, event in reversed([*itertools.pairwise([*events[:1], *events])]):
        is_start = event["event"] == "start"
        # otherwise, the return is undone itself
        if event["event"] == "returned" and event["step"] <= kept:
            kept = event["to"]
        step, seconds = (event["step"], {}) if is_start else (before["step"], before["seconds"])
        share_lost = 1 - min(1.0, max(0, kept - step) / max(1, event["step"] - step))
        for phase, total in event["seconds"].items():
            part, spent = _PARTS.get(phase, "training"), total - seconds.get(phase, 0.0)
            lost = share_lost * spent if part == "training" else 0.0
            parts["lost steps"] += lost
            parts[part] += spent - lost
        if is_start:
            kept = min(kept, event["step"])
            if event is not before:
                parts["restart"] += parts.pop("start-up", 0.0) + max(
                    0.0, event["begun"] - before["time"]
                )
    if events:
        parts["other"] += max(0.0, events[-1]["time"] - events[0]["begun"] - sum(parts.values()))
    return dict(
        sorted(((name, time) for name, time in parts.items() if time), key=lambda part: -part[1])
    )


def mean_phases(events: Sequence[Event]) -> dict[str, float]:
    """Return the mean seconds of a step by phase in the last session, without its first step, which
    may compile; none if it took no further steps."""
    session = [*itertools.takewhile(lambda event: event["event"] != "start", reversed(events))]
    return mean_between(session[-1], session[0]) if session else {}


def mean_between(first: Event, last: Event) -> dict[str, float]:
    """Return the mean seconds by phase of the steps between two events of a session; none without
    steps."""
    n_steps = last["step"] - first["step"]
    spent = {
        phase: total - first["seconds"].get(phase, 0.0) for phase, total in last["seconds"].items()
    }
    return (
        {phase: time / n_steps for phase, time in spent.items() if time > 0} if n_steps > 0 else {}
    )


def shares(seconds: Mapping[str, float]) -> dict[str, str]:
    """Return each of these times as text, with its share of the sum."""
    total = sum(seconds.values())
    shown = {
        name: f"{time:,.1f} s" if total >= 10 else f"{1000 * time:,.1f} ms"
        for name, time in seconds.items()
    }
    return {
        name: f"{shown[name]} ({time / total:.1%})" if total else shown[name]
        for name, time in seconds.items()
    }


def describe_goodput(parts: Mapping[str, float]) -> str:
    """Return a result of `goodput` as text."""
    wall = sum(parts.values())
    if not 0 < wall < _MOST_SECONDS:
        return "unknown"
    rest = [f"{name} {seconds / wall:.1%}" for name, seconds in parts.items() if name != "training"]
    return (
        f"{parts.get('training', 0.0) / wall:.1%} of {timedelta(seconds=round(wall))}; "
        f"{', '.join(rest)}"
    )

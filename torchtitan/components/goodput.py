"""Goodput: the part of a run's wall-clock time that advanced its training, and where the rest went."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torchtitan.components.run_events import Event

TRAINING = "training"
_PARTS = {name: name for name in ("start-up", "data", "validation", "save")}
_PARTS |= {"between steps": "other", "return to a checkpoint": "restart"}
"""Phase → part of the run's time; all other phases are parts of a step, and are training."""


def goodput(events: Sequence[Event]) -> dict[str, float]:
    """Return the time of a run in seconds by part, largest first; none without events. The parts (docs/report.md) add
    up to the time from the first start to the last event.

    A session is known up to its last event: the time from there to the first step of the next one is "restart", also if
    the session was killed between two events. Steps are lost if a later session starts before them, or the run returns
    to an earlier checkpoint; the time between two events is divided by their steps.
    """
    parts: dict[str, float] = defaultdict(float)
    kept = math.inf  # the last step that later events do not undo
    for index in reversed(range(len(events))):
        event, before = events[index], events[max(0, index - 1)]
        is_start = event["event"] == "start"
        if event["event"] == "returned" and event["step"] <= kept:  # otherwise, the return is undone itself
            kept = event["to"]
        step, seconds = (event["step"], {}) if is_start else (before["step"], before["seconds"])
        share_lost = 1 - min(1.0, max(0, kept - step) / max(1, event["step"] - step))
        for phase, total in event["seconds"].items():
            part, spent = _PARTS.get(phase, TRAINING), total - seconds.get(phase, 0.0)
            lost = share_lost * spent if part == TRAINING else 0.0
            parts["lost steps"] += lost
            parts[part] += spent - lost
        if is_start:
            kept = min(kept, event["step"])
            if index > 0:
                parts["restart"] += parts.pop("start-up", 0.0) + max(0.0, event["begun"] - before["time"])
    if events:
        parts["other"] += max(0.0, events[-1]["time"] - events[0]["begun"] - sum(parts.values()))
    return dict(sorted(((name, time) for name, time in parts.items() if time), key=lambda part: -part[1]))


def mean_phases(events: Sequence[Event]) -> dict[str, float]:
    """Return the mean seconds of a step by phase in the last session, without its first step, which may compile; none
    if it took no further steps."""
    session = [*itertools.takewhile(lambda event: event["event"] != "start", reversed(events))]
    if not session or session[0]["step"] <= session[-1]["step"]:
        return {}
    last, first, n_steps = session[0]["seconds"], session[-1]["seconds"], session[0]["step"] - session[-1]["step"]
    return {phase: mean for phase in last if (mean := (last[phase] - first.get(phase, 0.0)) / n_steps) > 0}


def shares(seconds: Mapping[str, float]) -> dict[str, str]:
    """Return each of these times as text, with its share of the sum."""
    total = sum(seconds.values())
    shown = {name: f"{time:,.1f} s" if total >= 10 else f"{1000 * time:,.1f} ms" for name, time in seconds.items()}
    return {name: f"{shown[name]} ({time / total:.1%})" for name, time in seconds.items()}


def describe_goodput(parts: Mapping[str, float]) -> str:
    """Return a result of `goodput` as text."""
    wall = sum(parts.values())
    rest = [f"{name} {seconds / wall:.1%}" for name, seconds in parts.items() if name != TRAINING]
    duration = timedelta(seconds=round(wall))
    return f"goodput {parts.get(TRAINING, 0.0) / wall:.1%} of {duration}; {', '.join(rest)}"

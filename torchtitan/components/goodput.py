"""Goodput: the part of a run's wall-clock time that advanced its training, and where the rest went."""

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
    the session was killed between two events. Steps up to the last event are lost if a later session starts before.
    """
    starts = [index for index, event in enumerate(events) if event["event"] == "start"]
    sessions = [events[begin:end] for begin, end in zip(starts, [*starts[1:], None], strict=False)]
    parts: dict[str, float] = defaultdict(float)
    for index, session in enumerate(sessions):
        start, last, is_first = session[0], session[-1], index == 0
        parts["restart"] += 0.0 if is_first else max(0.0, start["begun"] - sessions[index - 1][-1]["time"])
        phases = next(event["seconds"] for event in reversed(session) if "seconds" in event)
        for phase, seconds in phases.items():
            part = _PARTS.get(phase, TRAINING)
            parts["restart" if part == "start-up" and not is_first else part] += seconds
        parts["other"] += max(0.0, last["time"] - start["begun"] - sum(phases.values()))
        if kept := [later[0]["step"] for later in sessions[index + 1 :]]:
            lost = _training(phases) - _training_until(min(kept), session)
            parts["lost steps"] += lost
            parts[TRAINING] -= lost
    return dict(sorted(((name, time) for name, time in parts.items() if time), key=lambda part: -part[1]))


def describe_goodput(parts: Mapping[str, float]) -> str:
    """Return a result of `goodput` as text."""
    wall = sum(parts.values())
    rest = [f"{name} {seconds / wall:.1%}" for name, seconds in parts.items() if name != TRAINING]
    duration = timedelta(seconds=round(wall))
    return f"goodput {parts.get(TRAINING, 0.0) / wall:.1%} of {duration}; {', '.join(rest)}"


def _training(phases: Mapping[str, float]) -> float:
    return sum(seconds for phase, seconds in phases.items() if phase not in _PARTS)


def _training_until(step: int, session: Sequence[Event]) -> float:
    """Return the training time of a session up to a step, in proportion between the steps of two events."""
    begin, before = session[0]["step"], 0.0
    for event in session:
        if "seconds" in event:
            time = _training(event["seconds"])
            if event["step"] > step:
                return before + max(0, step - begin) / max(1, event["step"] - begin) * (time - before)
            begin, before = event["step"], time
    return before

"""Goodput: the part of a run's wall-clock time that advanced its training, and where the rest went."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torchtitan.components.run_events import Event

TRAINING, LOST, RESTART = "training", "lost steps", "restart"
_PARTS = {"start-up": "start-up", "data": "data", "validation": "validation", "save": "save", "between steps": "other"}
"""Phase → part of the run's time; all other phases are parts of a step, and are training."""


@dataclass(frozen=True)
class Goodput:
    """The wall-clock time of a run in seconds, by part, largest first. Training excludes the steps that a crash lost,
    which a later session repeated."""

    parts: dict[str, float]

    @property
    def wall(self) -> float:
        return sum(self.parts.values())

    @property
    def fraction(self) -> float:
        """Training time divided by wall-clock time."""
        return self.parts[TRAINING] / self.wall if self.wall else 0.0

    def __str__(self) -> str:
        rest = [f"{name} {seconds / self.wall:.1%}" for name, seconds in self.parts.items() if name != TRAINING]
        return f"goodput {self.fraction:.1%} of {timedelta(seconds=round(self.wall))}; {', '.join(rest)}"


def goodput(events: Sequence[Event]) -> Goodput | None:
    """Account for the time from the first start to the last event; None without events.

    A session is known up to its last event: the time from there to the first step of the next one is `restart`, also if
    the session was killed between two events. Steps up to the last event count as lost if a later session starts before
    them.
    """
    if not events:
        return None
    sessions: list[list[Event]] = []
    for event in events:
        sessions += [[]] if event["event"] == "start" else []
        sessions[-1].append(event)
    parts: dict[str, float] = {TRAINING: 0.0}

    def add(part: str, seconds: float) -> None:
        parts[part] = parts.get(part, 0.0) + max(0.0, seconds)

    for index, session in enumerate(sessions):
        start, last = session[0], session[-1]
        if index:
            add(RESTART, start["begun"] - sessions[index - 1][-1]["time"])
        phases = next(event["seconds"] for event in reversed(session) if "seconds" in event)
        for phase, seconds in phases.items():
            part = _PARTS.get(phase, TRAINING)
            add(RESTART if part == "start-up" and index else part, seconds)
        add("other", last["time"] - start["begun"] - sum(phases.values()))
        kept = min((later[0]["step"] for later in sessions[index + 1 :]), default=None)
        if kept is not None:
            lost = _training(phases) - _training_until(kept, session)
            add(LOST, lost)
            parts[TRAINING] -= max(0.0, lost)
    return Goodput(dict(sorted(parts.items(), key=lambda part: -part[1])))


def _training(phases: dict[str, float]) -> float:
    return sum(seconds for phase, seconds in phases.items() if phase not in _PARTS)


def _training_until(step: int, session: Sequence[Event]) -> float:
    """Return the training time of a session up to a step, in proportion between the steps of two events."""
    before_step, before = session[0]["step"], 0.0
    for event in session:
        if "seconds" not in event:
            continue
        if event["step"] > step:
            share = max(0, step - before_step) / max(1, event["step"] - before_step)
            return before + share * (_training(event["seconds"]) - before)
        before_step, before = event["step"], _training(event["seconds"])
    return before

"""Rank and alpha of each adapter, chosen by patterns of names as in PEFT."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

Value = TypeVar("Value", int, float)


class Size(NamedTuple):
    """Size of an adapter."""

    rank: int
    alpha: float

    def scaling(self, rslora: bool) -> float:
        """Return the factor of the adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if rslora else self.rank)


def is_match(pattern: str, name: str) -> bool:
    """Return whether a regular expression matches the last parts of a layer's name, as in PEFT.
    Raise `re.error`."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def look_up(patterns: Mapping[str, Value], name: str, default: Value) -> Value:
    """Return the value of the first pattern that matches `name`. Raise `re.error`."""
    return next((value for pattern, value in patterns.items() if is_match(pattern, name)), default)


def find_patterns(values: Mapping[str, Value], default: Value) -> dict[str, Value]:
    """Return patterns for `look_up` to find the value of each name. Each pattern has as few of a
    name's last parts as possible; their order does not matter."""
    values_of: dict[str, set[Value]] = {}
    for name, value in values.items():
        for ending in _endings(name):
            values_of.setdefault(ending, set()).add(value)
    patterns: dict[str, Value] = {}
    for name, value in values.items():
        if value != default:
            shortest = next(ending for ending in _endings(name) if values_of[ending] == {value})
            patterns[shortest] = value
    return patterns


def _endings(name: str) -> Iterable[str]:
    """Yield patterns of the last part, of the last two parts, …, and of the whole name."""
    parts = name.split(".")
    for start in range(len(parts) - 1, 0, -1):
        yield re.escape(".".join(parts[start:]))
    yield f"^{re.escape(name)}"

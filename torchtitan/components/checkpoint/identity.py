"""Identity of runs and weights, which keeps runs from loading or overwriting another run's
checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchtitan.tools.redact import unsigned

BASE_PATH = "checkpoint.initial_load_path "
"""Prefix of `BaseWeights.description` for weights in a folder or at a URL."""


@dataclass(frozen=True)
class BaseWeights:
    """Origin of the initial weights of a run."""

    description: str
    """Text for messages and markers."""

    digest: Callable[[], str] = lambda: ""
    """Return a digest of the weights, empty if `description` identifies them; raise `UserError` if
    unreadable."""

    @classmethod
    def of_seed(cls, seed: int) -> "BaseWeights":
        """Initial weights drawn with a run's seed. Another generator than Philox would draw other
        weights."""
        return cls(f"debug.seed {seed} (Philox)")

    @property
    def path(self) -> str:
        """Folder or URL; empty for weights generated from a seed."""
        return (
            self.description.removeprefix(BASE_PATH)
            if self.description.startswith(BASE_PATH)
            else ""
        )


@dataclass(frozen=True)
class RunIdentity:
    """Properties that a run keeps across interruptions."""

    properties: Mapping[str, object]
    """Name → a JSON-serializable value other than a dict, or the result of `identify_content`."""

    length: Mapping[str, int]
    """Requested `steps` or `epochs`, which may change between interruptions."""

    def describe_differences(self, saved: Mapping[str, object]) -> list[str]:
        """Describe the properties that differ from a marker's. A property known to only one side
        counts as equal."""
        pairs = [
            (name, saved[name], self.properties[name]) for name in self.properties if name in saved
        ]
        return [
            _describe(name, before, now)
            for name, before, now in pairs
            if not _are_equal(before, now)
        ]

    def is_finished(self, step: int, length: Mapping[str, int]) -> bool:
        """Return whether a run of `length` that ended at `step`, possibly by running out of data,
        is complete."""
        [(unit, requested)] = self.length.items()
        completed = step if unit == "steps" else length.get(unit, 0)
        return requested <= completed or length == self.length


def identify_content(location: str, digest: str) -> dict[str, str]:
    """Return a property compared by `digest`, or by `location` if the content is unreadable
    (`digest` is empty)."""
    return {"location": unsigned(location), "digest": digest}


def _are_equal(before: object, now: object) -> bool:
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return bool(before == now)
    key = "digest" if before["digest"] and now["digest"] else "location"
    return bool(before[key] == now[key])


def _describe(name: str, before: object, now: object) -> str:
    old, new = _format_value(before), _format_value(now)
    return f"{name} ({new}) has changed since" if old == new else f"{name} was {old} and is {new}"


def _format_value(value: object) -> str:
    if isinstance(value, dict):
        return str(value["location"])
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value)) or "none"

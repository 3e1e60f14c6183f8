"""Identity of runs and weights, so that no run resumes from, or overwrites, another run's checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BASE_PATH = "checkpoint.initial_load_path "
"""Beginning of `BaseWeights.words` if the weights are in a folder or at a URL."""


@dataclass(frozen=True)
class BaseWeights:
    """Origin of the initial weights of a run."""

    words: str
    """Text for messages and markers."""

    digest: Callable[[], str] = lambda: ""
    """Return an identifier of the weights, empty if `words` suffices; raise `UserError` if they cannot be read."""

    @classmethod
    def of_seed(cls, seed: int) -> "BaseWeights":
        """Initial weights that follow from a run's seed."""
        return cls(f"debug.seed {seed}")

    @property
    def path(self) -> str:
        """Folder or URL; empty if there is none."""
        return self.words.removeprefix(BASE_PATH) if self.words.startswith(BASE_PATH) else ""


@dataclass(frozen=True)
class RunIdentity:
    """Properties that stay the same for the life of a run, however often it is stopped and resumed."""

    properties: Mapping[str, Any]
    """Name → JSON-serializable value that is no object, or a `content`."""

    length: Mapping[str, int]
    """Requested `steps` or `epochs`. They may change; a finished run is recognized by them."""

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Describe the properties that differ from a marker's; a property known to only one side counts as equal."""
        pairs = [(name, saved[name], self.properties[name]) for name in self.properties if name in saved]
        return [_in_words(name, then, now) for name, then, now in pairs if not _equal(then, now)]

    def is_finished(self, step: int, length: Mapping[str, int]) -> bool:
        """Return whether a run of `length` that ended, perhaps out of data, at `step` has nothing left to train."""
        [(unit, asked)] = self.length.items()
        made = step if unit == "steps" else length.get(unit, 0)
        return asked <= made or length == self.length


def content(location: str, digest: str) -> dict[str, str]:
    """Return a property compared by `digest`, or by `location` if the content cannot be read (`digest` is empty)."""
    return {"location": location, "digest": digest}


def _equal(then: Any, now: Any) -> bool:
    if not (isinstance(then, dict) and isinstance(now, dict)):
        return bool(then == now)
    key = "digest" if then["digest"] and now["digest"] else "location"
    return bool(then[key] == now[key])


def _in_words(name: str, then: Any, now: Any) -> str:
    before, after = _value(then), _value(now)
    return f"{name} ({after}) has changed since" if before == after else f"{name} was {before} and is {after}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return str(value["location"])
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value)) or "none"

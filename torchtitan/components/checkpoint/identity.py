"""The identity of a run: checkpoints carry it, so that no run resumes from, or writes over, another run's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpoint.origin import Origin
from torchtitan.tools.errors import UserError


@dataclass(frozen=True)
class RunIdentity:
    """Properties that stay the same as long as a run lives, however often it is stopped and resumed."""

    properties: Mapping[str, Any]
    """Name → JSON-ready value that is no object, or a `content`."""

    length: Mapping[str, int]
    """The `steps` or the `epochs` asked for. They may change; a finished run is recognized by them."""

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the properties that differ from the ones saved in a checkpoint's marker, in words.

        A property that only one side knows counts as equal: a configuration built in Python has no registered name.
        """
        pairs = [(name, saved[name], self.properties[name]) for name in self.properties if name in saved]
        return [_in_words(name, then, now) for name, then, now in pairs if not _equal(then, now)]

    def is_finished(self, step: int, length: Mapping[str, int]) -> bool:
        """Return whether this run has nothing left to train after a run of `length` that ended at `step`.

        The data may have ended before the last of the `steps`.
        """
        [(unit, asked)] = self.length.items()
        made = step if unit == "steps" else length.get(unit, 0)
        return asked <= made or length == self.length


def content(location: str, digest: str) -> dict[str, str]:
    """Return a property that is compared by content, wherever the files are.

    Args:
        location: path or another description; compared if a digest is missing.
        digest: digest of the content; empty if the content cannot be read.
    """
    return {"location": location, "digest": digest}


def base_weights(initial_load_path: str) -> dict[str, str]:
    """Return the property of the weights that a run begins from, which may be gone by the time it resumes."""
    if not initial_load_path:
        return content("none", "")
    origin = Origin.at(initial_load_path)
    try:
        return content(origin.path, origin.digest())
    except (UserError, OSError):
        return content(origin.path, "")


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

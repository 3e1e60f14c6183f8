"""The identity of a run: checkpoints carry it, so that no run resumes from, or writes over, another run's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpoint.origin import Origin
from torchtitan.tools.errors import UserError


@dataclass(frozen=True)
class RunIdentity:
    """What stays the same for as long as a run lives, however often it is stopped and resumed."""

    properties: Mapping[str, Any]
    """Name → JSON-ready value. A `content` property says where something lies and has a digest of it."""

    length: Mapping[str, int]
    """The `steps` or `epochs` asked for. They may change; a finished run is recognized by them."""

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the properties that differ from those in a checkpoint's marker, in words.

        A property that only one side knows counts as equal: a configuration built in Python has no registered name.
        """
        pairs = [(name, saved[name], self.properties[name]) for name in self.properties if name in saved]
        return [_in_words(name, then, now) for name, then, now in pairs if not _equal(then, now)]

    def is_finished(self, step: int, length: Mapping[str, int]) -> bool:
        """Return whether this run has nothing left to train after a run of `length` that ended at `step`."""
        return length == self.length or self.length.get("steps", step + 1) <= step


def content(location: str, digest: str) -> dict[str, str]:
    """Return the property of something that is told by its content, wherever it lies.

    Args:
        location: its path or another description; compared where a digest is missing.
        digest: of its content; empty if that cannot be read.
    """
    return {"location": location, "digest": digest}


def base_weights(initial_load_path: str) -> dict[str, str]:
    """Return the property of the weights that a run begins from; they need not be there anymore when it resumes."""
    if not initial_load_path:
        return content("none", "")
    origin = Origin.at(initial_load_path)
    try:
        return content(origin.path, origin.digest())
    except (UserError, OSError):
        return content(origin.path, "")


def _equal(then: Any, now: Any) -> bool:
    if not (_is_content(then) and _is_content(now)):
        return bool(then == now)
    known = then["digest"] and now["digest"]
    return bool(then["digest"] == now["digest"] if known else then["location"] == now["location"])


def _in_words(name: str, then: Any, now: Any) -> str:
    if _is_content(then) and _is_content(now):
        then, now = then["location"], now["location"]
        if then == now:
            return f"{name} ({now}) has changed since"
    return f"{name} was {_value(then)} and is {_value(now)}"


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _is_content(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"location", "digest"}

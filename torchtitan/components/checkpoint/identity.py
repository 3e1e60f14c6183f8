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
    """Name → JSON-ready value; `content` and `location` make those that two runs may name differently."""

    length: Mapping[str, int]
    """The `steps` or `epochs` asked for. They may change; a finished run is recognized by them."""

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the properties that differ from the ones saved in a checkpoint's marker, in words.

        A property that only one side knows counts as equal: a configuration built in Python has no registered name.
        """
        pairs = [(name, saved[name], self.properties[name]) for name in self.properties if name in saved]
        return [_in_words(name, then, now) for name, then, now in pairs if not _equal(then, now)]

    def is_finished(self, step: int, length: Mapping[str, int]) -> bool:
        """Return whether this run has nothing left to train after a run of `length` that ended at `step`."""
        return length == self.length or self.length.get("steps", step + 1) <= step


def content(location: str, digest: str) -> dict[str, str]:
    """Return a property that is compared by content, wherever the files are.

    Args:
        location: path or another description; compared if a digest is missing.
        digest: digest of the content; empty if the content cannot be read.
    """
    return {"location": location, "digest": digest}


def location(given: Any, absolute: Any) -> dict[str, Any]:
    """Return a property that is compared by path. The same words or the same absolute path are enough: a run may move
    as a whole, and may be resumed from another working directory."""
    return {"given": given, "absolute": absolute}


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
    if then == now or not (isinstance(then, dict) and isinstance(now, dict)):
        return bool(then == now)
    if then.get("digest") and now.get("digest"):
        return bool(then["digest"] == now["digest"])
    return any(then.get(key) == now[key] for key in ("location", "given", "absolute") if key in now)


def _in_words(name: str, then: Any, now: Any) -> str:
    before, after = _value(then), _value(now)
    return f"{name} ({after}) has changed since" if before == after else f"{name} was {before} and is {after}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("location", value.get("absolute", value))
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

"""Types of options whose values need trust: no file may set them, unless Python or the command line
does too. `CodeReference` names code, `CodeFolder` a folder with code, `RunFolder` and `CacheFolder`
a folder to write to."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, get_args

from torchtitan.tools.files import is_url


@dataclass(frozen=True)
class NamesCode:
    """Mark of a string that may name code to run, `package.module:function` or
    `path/to/file.py:function`.

    The command line and Python may set such code. A file may only set built-in names: values
    without a colon, or those that begin with one of `built_in`.
    """

    built_in: tuple[str, ...] = ()
    """Beginnings of values that are never code, such as `pattern=`."""

    problem: ClassVar[str] = "code that is neither built in nor installed"

    def needs_trust(self, value: str) -> bool:
        """Return whether the value names code."""
        return ":" in value and not value.startswith(self.built_in)


CodeReference = Annotated[str, NamesCode()]
"""Type of an option that names code: a name without a colon is built in, any other value is a
reference."""


@dataclass(frozen=True)
class HoldsCode:
    """Mark of a folder whose code runs."""

    problem: ClassVar[str] = "a folder whose code would run"

    def needs_trust(self, value: str) -> bool:
        """Return whether the value names a folder."""
        return bool(value)


CodeFolder = Annotated[str, HoldsCode()]
"""Type of an option that names a folder with code, or none."""


@dataclass(frozen=True)
class StaysInRun:
    """Mark of a folder that a run writes to, and that is in its dump folder, unless the command
    line or Python names another one."""

    problem: ClassVar[str] = "no folder inside the dump folder"

    def needs_trust(self, value: str) -> bool:
        """Return whether the value names a folder elsewhere, or the dump folder itself."""
        path = os.path.normpath(value)
        return (
            is_url(value)
            or os.path.isabs(path)
            or path.split(os.sep)[0] in (".", "..", "~")
            or "\0" in value
        )


RunFolder = Annotated[str, StaysInRun()]
"""Type of an option that names a folder of a run, relative to its dump folder."""


@dataclass(frozen=True)
class StaysInCache:
    """Mark of a folder that a run writes to and that other runs read. It is in the cache folder of
    this machine, unless the command line or Python names another place."""

    problem: ClassVar[str] = "no folder inside the cache ($TORCHTITAN_CACHE or ~/.cache/torchtitan)"

    def needs_trust(self, value: str) -> bool:
        """Return whether the value names a folder elsewhere."""
        if not value:
            return False
        from torchtitan.tools.digests import cache_root  # deferred: it takes long to import

        root = os.path.realpath(cache_root())
        return "\0" in value or not Path(
            os.path.realpath(os.path.expanduser(value))
        ).is_relative_to(root)


CacheFolder = Annotated[str, StaysInCache()]
"""Type of an option that names a folder of a cache; empty: the default."""

Mark = NamesCode | HoldsCode | StaysInRun | StaysInCache


def untrusted_in(value: object, declared: object) -> dict[str, str]:
    """Return the texts in the value of an option with the declared type, at any depth, that need
    trust → the reason."""
    marks = _marks(declared)
    if not marks or value is None:
        return {}
    texts = list(map(str, _items(value)))
    return {text: mark.problem for text in texts for mark in marks if mark.needs_trust(text)}


def _marks(declared: object) -> list[Mark]:
    """Return the marks in a type, including the marks of a list's item type."""
    found = [mark for mark in getattr(declared, "__metadata__", ()) if isinstance(mark, Mark)]
    return found + [mark for argument in get_args(declared) for mark in _marks(argument)]


def _items(value: object) -> list[object]:
    """Return the innermost values of lists and mappings, or the value itself."""
    if isinstance(value, Mapping):
        return [item for part in value.values() for item in _items(part)]
    if isinstance(value, list | tuple):
        return [item for part in value for item in _items(part)]
    return [value]

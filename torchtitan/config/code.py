"""`CodeReference`: the type of every option that names code, which no file may set."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args


@dataclass(frozen=True)
class NamesCode:
    """Mark of a string that may name code to run, `package.module:function` or `path/to/file.py:function`.

    The command line and Python may set such code. A file may only set built-in names: values without a colon, or those
    that begin with one of `built_in`.
    """

    built_in: tuple[str, ...] = ()
    """Beginnings of values that are never code, such as `pattern=`."""

    def is_code(self, value: str) -> bool:
        """Return whether the value names code."""
        return ":" in value and not value.startswith(self.built_in)


CodeReference = Annotated[str, NamesCode()]
"""Type of an option that names code: a name without a colon is built in, any other value is a reference."""


def code_in(value: Any, declared: Any) -> list[str]:
    """Return the references to code in the value of an option with the declared type, at any depth."""
    marks = _marks(declared)
    if not marks or value is None:
        return []
    texts = list(map(str, _items(value)))
    return [text for text in texts if any(mark.is_code(text) for mark in marks)]


def _marks(declared: Any) -> list[NamesCode]:
    """Return the marks in a type, such as that of the items of a list."""
    found = [mark for mark in getattr(declared, "__metadata__", ()) if isinstance(mark, NamesCode)]
    return found + [mark for argument in get_args(declared) for mark in _marks(argument)]


def _items(value: Any) -> list[Any]:
    """Return what a value of lists and mappings contains, or the value itself."""
    if isinstance(value, Mapping):
        return [item for part in value.values() for item in _items(part)]
    if isinstance(value, list | tuple):
        return [item for part in value for item in _items(part)]
    return [value]

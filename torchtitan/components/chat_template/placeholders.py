"""Placeholders of texts, which record what a template does with them.

A placeholder is not a `str`, and everything that a template can do with a value goes through the
environment of `recorder`. An operation that may depend on more than the recorded answers raises
`Unrecordable`; such shapes are always rendered by the template itself.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torchtitan.components.chat_template.recordings import Step, Values, checked, joined

_MOST_PARTS = 1 << 16
"""Parts of a recording."""

_MOST_GROWTH = 8
"""Length of a replacement, compared with what it replaces."""


class Unrecordable(Exception):
    """A template does something with a text that recordings do not support."""


class Trace:
    """A recording in progress."""

    def __init__(self) -> None:
        self.values: Values = []
        self.steps: list[Step] = []

    def leaf(self, text: str) -> "Text":
        assert not self.steps
        self.values.append(text)
        return Text(self, (len(self.values) - 1,))

    def made(self, function: Callable[[Values], object]) -> int:
        """Record a new value; return its number."""
        if len(self.steps) >= _MOST_PARTS:
            raise Unrecordable
        self.values.append(checked(function(self.values)))
        self.steps.append(Step(function))
        return len(self.values) - 1

    def answered(self, function: Callable[[Values], object]) -> Any:
        """Record a question; return its answer, which is not None."""
        answer = function(self.values)
        assert answer is not None
        if len(self.steps) >= _MOST_PARTS:
            raise Unrecordable
        self.steps.append(Step(function, answer))
        return answer


def _unsupported(self: object, *args: object, **kwargs: object) -> NoReturn:
    raise Unrecordable


_UNSUPPORTED = (
    *("__str__", "__repr__", "__format__", "__len__", "__iter__", "__int__", "__float__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__mod__", "__rmod__", "__mul__", "__rmul__"),
)

_Opaque: Any = type("_Opaque", (), {"__slots__": (), **dict.fromkeys(_UNSUPPORTED, _unsupported)})
"""Class of values that templates cannot read."""


class Text(_Opaque):
    """Placeholder of a text: pieces of literal text and numbers of values."""

    __slots__ = ("parts", "trace")

    def __init__(self, trace: Trace, parts: tuple[str | int, ...]):
        if len(parts) > _MOST_PARTS:
            raise Unrecordable
        self.trace, self.parts = trace, parts

    def number(self) -> int:
        """Return the number of the value that is this text."""
        if len(self.parts) != 1 or isinstance(self.parts[0], str):
            parts = self.parts
            self.parts = (self.trace.made(lambda values: joined(parts, values)),)
        [number] = self.parts
        assert isinstance(number, int)
        return number

    def made(self, function: Callable[..., object], *args: object) -> "Text":
        """Return the text that a function makes of this one."""
        number = self.number()
        return Text(self.trace, (self.trace.made(lambda values: function(values[number], *args)),))

    def answer(self, function: Callable[..., object], *args: object) -> Any:
        """Return the answer of a function about this text."""
        number = self.number()
        return self.trace.answered(lambda values: function(values[number], *args))

    def pieces(self, function: Callable[..., Sequence[str]], *args: object) -> "list[Text]":
        """Return the texts into which a function divides this one."""
        number, trace = self.number(), self.trace
        whole = trace.made(lambda values: function(values[number], *args))
        n_pieces = trace.answered(lambda values: len(values[whole]))
        numbers = [
            trace.made(functools.partial(_piece, whole=whole, index=index))
            for index in range(n_pieces)
        ]
        return [Text(trace, (number,)) for number in numbers]

    def __bool__(self) -> bool:
        return bool(self.answer(bool))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Text):
            first, second = self.number(), other.number()
            return bool(self.trace.answered(lambda values: values[first] == values[second]))
        return isinstance(other, str) and bool(self.answer(operator.eq, other))

    def __contains__(self, other: object) -> bool:
        if isinstance(other, Text):
            first, second = self.number(), other.number()
            return bool(self.trace.answered(lambda values: values[second] in values[first]))
        return bool(self.answer(operator.contains, other))

    def __add__(self, other: object) -> "Text":
        return Text(self.trace, (*self.parts, *parts_of(other)))

    def __radd__(self, other: object) -> "Text":
        return Text(self.trace, (*parts_of(other), *self.parts))

    def __getitem__(self, index: object) -> "Text":
        if not isinstance(index, slice):
            raise Unrecordable
        return self.made(operator.getitem, index)

    # `None`, as without a declaration, raises a `TypeError`, which Jinja takes as a missing key.
    __hash__ = _unsupported


def _piece(values: Values, whole: int, index: int) -> str:
    text: str = values[whole][index]
    return text


def parts_of(value: object) -> tuple[str | int, ...]:
    if isinstance(value, Text):
        return value.parts
    if type(value) is str:
        return (value,)
    raise Unrecordable


def concatenated(pieces: Any) -> Any:
    """Return pieces of text as one, a placeholder if one of them is one."""
    pieces = [*pieces]
    found = next((piece for piece in pieces if isinstance(piece, Text)), None)
    if found is None:
        return "".join(pieces)
    return Text(found.trace, tuple(part for piece in pieces for part in parts_of(piece)))


MADE = (
    *("capitalize", "lower", "lstrip", "removeprefix", "removesuffix", "replace", "rstrip"),
    *("strip", "title", "upper"),
)
"""Methods of texts that return a text."""

ASKED = ("count", "endswith", "find", "index", "rfind", "startswith", "isdigit", "isspace")
"""Methods that return a number or truth value."""

DIVIDING = ("partition", "rpartition", "rsplit", "split", "splitlines")


class Method:
    """A method of a placeholder."""

    def __init__(self, text: Text, name: str):
        self._text, self._name = text, name  # which templates cannot read

    def __call__(self, *args: object) -> object:
        if any(type(argument) not in (str, int, tuple) for argument in args):
            raise Unrecordable
        if self._name == "replace":
            check_growth(*args)
        function = getattr(str, self._name)
        if self._name in MADE:
            return self._text.made(function, *args)
        if self._name in ASKED:
            return self._text.answer(function, *args)
        return self._text.pieces(function, *args)


def check_growth(old: object, new: object, *count: object) -> None:
    if not isinstance(old, str) or not isinstance(new, str) or count:
        raise Unrecordable
    if len(new) > _MOST_GROWTH * len(old):
        raise Unrecordable

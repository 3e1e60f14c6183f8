"""One path through a template: what it asks about the texts of a conversation, makes of them, and
writes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

LONGEST_TEXT = 1 << 20
"""Characters of a conversation, and of each text that a template makes of it, up to which
recordings are used. Longer ones may exceed the limits of the sandbox, which only the template's own
run checks."""

_MOST_CHARACTERS = 1 << 26
"""Characters of a rendering; more are not recorded, so that hostile templates use little memory."""

Values = list[Any]
"""Texts of a conversation, followed by what the steps of a recording make of them."""


class _TooLong(Exception):
    """A text exceeds the limits of recordings."""


class Step(NamedTuple):
    """Something that a template does with a text."""

    function: Callable[[Values], object]
    answer: object = None
    """Expected result, for a question; None: the result is a new value."""


class Recording(NamedTuple):
    """One path through a template."""

    steps: tuple[Step, ...]
    parts: tuple[str | int, ...]
    """Rendering: literal text, and numbers of values."""

    def replay(self, texts: Sequence[str]) -> str | None:
        """Return the rendering with other texts; None if they lead to another path."""
        values: Values = [*texts]
        try:
            for function, answer in self.steps:
                result = function(values)
                if answer is not None and result != answer:
                    return None
                if answer is None:
                    values.append(checked(result))
            return joined(self.parts, values)
        except (_TooLong, ValueError):  # such as of `index` for a text that is not found
            return None


def joined(parts: Sequence[str | int], values: Values) -> str:
    pieces: list[str] = [part if isinstance(part, str) else values[part] for part in parts]
    if len(pieces) * max(map(len, pieces), default=0) > _MOST_CHARACTERS:
        raise _TooLong
    return "".join(pieces)


def checked(value: object) -> object:
    """Return a text or list of texts. Raise `_TooLong` if it is too long."""
    assert isinstance(value, str | list | tuple)
    if len(value) > LONGEST_TEXT:
        raise _TooLong
    return value

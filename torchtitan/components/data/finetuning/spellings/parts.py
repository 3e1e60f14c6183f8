"""Parts of a message's content."""

from collections.abc import Mapping

_TEXT_PARTS = ("text", "input_text", "output_text")


def type_of(part: object) -> object:
    return part.get("type") if isinstance(part, Mapping) else None


def is_text(part: object) -> bool:
    return (
        isinstance(part, str)
        or isinstance(text_of(part), str)
        and type_of(part) in (None, *_TEXT_PARTS)
    )


def has_text(part: object) -> bool:
    text = part if isinstance(part, str) else text_of(part)
    return isinstance(text, str) and bool(text.strip())


def text_of(part: object) -> object:
    keys = ("text", "value", "content")
    return (
        next((part[key] for key in keys if part.get(key) is not None), None)
        if isinstance(part, Mapping)
        else None
    )

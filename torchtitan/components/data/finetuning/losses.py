"""Parts of the assistant's messages that a text lacks."""

import json
from collections.abc import Iterator, Mapping
from typing import Literal

from torchtitan.components.chat_template.forms import REASONING, without_empty_block
from torchtitan.components.data.finetuning.conversation import Message

Part = Literal["reasoning", "tools", "content"]
"""Part of a message that a template may omit."""


def parts_of(message: Message) -> list[Part]:
    """Return the parts of an assistant's message that are not empty."""
    reasoning, content = message.get(REASONING), message.get("content")
    parts: list[Part] = []
    if isinstance(reasoning, str) and reasoning.strip():
        parts.append("reasoning")
    if message.get("tool_calls"):
        parts.append("tools")
    if isinstance(content, str) and without_empty_block(content).strip():
        parts.append("content")
    return parts


def lost_parts(message: Message, text: str) -> Iterator[Part]:
    """Yield the parts of an assistant's message that a text does not contain."""
    reasoning, content = message.get(REASONING), message.get("content")
    if isinstance(reasoning, str) and not is_written(reasoning, text):
        yield "reasoning"
    calls = message.get("tool_calls") or []
    if calls and not all(_is_called(call["function"], text) for call in calls):
        yield "tools"
    if isinstance(content, str) and not is_written(without_empty_block(content), text):
        yield "content"


def _is_called(function: Mapping[str, object], text: str) -> bool:
    if str(function["name"]) not in text:
        return False
    return all(is_written(leaf, text) for leaf in _leaves(function.get("arguments") or {}))


def _leaves(value: object) -> Iterator[str]:
    """Yield the keys and values in arguments as text."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield str(key)
            yield from _leaves(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _leaves(inside)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def is_written(part: str, text: str) -> bool:
    """Return whether a text contains a part as it is, without whitespace around it, or escaped as
    in JSON, in XML or by `repr`; numbers and constants also in Python's spelling. Whitespace inside
    does not count."""
    part = part.strip()
    if part in text:
        return True
    spellings = [
        json.dumps(part, ensure_ascii=False)[1:-1],
        json.dumps(part)[1:-1],
        repr(part)[1:-1],
    ]
    spellings += [json.dumps(spelling, ensure_ascii=False)[1:-1] for spelling in spellings[:1]]
    spellings += {"true": ["True"], "false": ["False"], "null": ["None"]}.get(part, [])
    spellings += [part.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")]
    if any(spelling in text for spelling in spellings):
        return True
    dense = "".join(text.split())
    return "".join(part.split()) in dense or any(
        "".join(spelling.split()) in dense for spelling in spellings
    )

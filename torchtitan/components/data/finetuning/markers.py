"""Messages with markers instead of their texts, to find the texts in renderings."""

import re
from collections.abc import Mapping
from typing import Any

from torchtitan.components.chat_template.forms import REASONING, WRITTEN
from torchtitan.components.data.finetuning.conversation import Message

MARK = "ContentMark"
_REASONING_MARK = "ReasoningMark"
_VALUE_MARK = "ValueMark"


def before_markers(text: str) -> str:
    """Return the text before the first marker."""
    places = [
        text.find(marker) for marker in (MARK, _REASONING_MARK, _VALUE_MARK) if marker in text
    ]
    return text[: min(places)] if places else text


def before_call(message: Message, text: str) -> str:
    """Return the text before the first argument of a message's calls, or before the name of the
    function without arguments; empty if the text has none."""
    function = message["tool_calls"][0]["function"]
    before, found, _ = text.partition(
        _VALUE_MARK if function.get("arguments") else function["name"]
    )
    return before if found else ""


def marked_answer(message: Message) -> Message:
    """Return a message of the assistant with markers instead of its texts."""
    content = message.get("content")
    reasoning = message.get(REASONING)
    written = message.get(WRITTEN)
    marked = dict(message)
    if isinstance(content, str) and content:
        marked["content"] = MARK
    if reasoning:
        marked[REASONING] = _REASONING_MARK
    if isinstance(written, str):
        changed = written.replace(str(reasoning), _REASONING_MARK, 1)
        head, found, tail = changed.rpartition(str(content)) if content else (changed, "", "")
        marked[WRITTEN] = head + MARK + tail if found else changed
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [_marked_call(call, number) for number, call in enumerate(calls)]
    return marked


def numbered(message: Message, number: int) -> Message:
    """Return a message with markers of its number instead of its texts."""
    marker = f"{MARK}{number}x"
    calls = message.get("tool_calls")
    marked = {**message}
    if message.get("content") or not calls:
        marked["content"] = marker
    if message.get(REASONING):
        marked[REASONING] = marker
    if WRITTEN in message:
        marked[WRITTEN] = str(message[WRITTEN]).replace(str(message.get(REASONING)), marker, 1)
    if calls:
        marked["tool_calls"] = [_marked_call(call, number, MARK) for call in calls]
    return marked


def numbered_marker(number: int) -> re.Pattern[str]:
    return re.compile(rf"{MARK}{number}x(\d+x)?")


def _marked_call(
    call: Mapping[str, Any], number: int, marker: str = _VALUE_MARK
) -> dict[str, object]:
    function = call["function"]
    names = function.get("arguments") or {}
    arguments = {name: f"{marker}{number}x{i}x" for i, name in enumerate(names)}
    return {**call, "function": {**function, "arguments": arguments}}

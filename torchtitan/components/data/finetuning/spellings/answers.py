"""The assistant's messages, in any spelling."""

from contextlib import suppress

from torchtitan.components.data.finetuning.calls_in_text import calls_in
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    from_json,
)
from torchtitan.components.data.finetuning.spellings.calls import openai_call
from torchtitan.components.data.finetuning.spellings.parts import (
    has_text,
    is_text,
    text_of,
    type_of,
)
from torchtitan.components.data.finetuning.spellings.reasoning import (
    HIDDEN_PARTS,
    REASONING_KEYS,
    REASONING_PARTS,
    one_reasoning,
    reasoning_text,
    split_reasoning,
)
from torchtitan.components.data.finetuning.spellings.roles import Turn

WRITTEN = "written"
"""Key of an answer's text as the row has it, with reasoning between tags, for templates that have
no other place for reasoning."""

OF_COLUMN = "reasoning column"

OF_ITEM = "reasoning item"

OF_CALL = "tags before its call"
"""Keys under which an answer carries reasoning from elsewhere, until all its reasoning is
compared."""

_CALL_PARTS = ("tool_use", "tool_call", "tool-call", "function_call")


def normal_answer(message: Turn) -> Turn:
    """Return an assistant's message in the normal form, except for ids of calls."""
    found = {}
    for key in (*REASONING_KEYS, OF_ITEM, OF_COLUMN, OF_CALL):
        value = message.pop(key, None)
        if value is not None:
            with suppress(BrokenSample):  # plain text
                if isinstance(value, str) and key == "reasoning_details":
                    value = from_json(value, key)
            found[key] = value
    if isinstance(message.get("content"), list):
        found["its parts"] = _take_parts(message)
    _take_refusal(message)
    content = message.get("content")
    written = None
    if isinstance(content, str) and (divided := split_reasoning(content)):
        found["tags in its content"], message["content"] = divided
        written = content if divided[0] else None
    reasoning = one_reasoning(found)
    if reasoning:
        message["reasoning_content"] = reasoning
    _take_calls(message)
    # Only text that is still the answer's whole text can be written back.
    others = (value for key, value in found.items() if key != "tags in its content")
    if written and not message.get("tool_calls") and not any(others):
        message[WRITTEN] = written
    return message


def _take_parts(message: Turn) -> str:
    """Move calls from the parts of a message to its calls, keep parts with text; return the
    reasoning."""
    kept: list[object] = []
    calls: list[object] = []
    reasoning = []
    for part in message["content"]:
        kind = type_of(part)
        if kind in HIDDEN_PARTS or kind in REASONING_PARTS:
            if any(map(has_text, kept)) or calls:
                raise BrokenSample(
                    "its reasoning comes after its text or calls; make them separate messages"
                )
            reasoning.append(reasoning_text(part, f"part of type {kind!r}"))
        elif kind in _CALL_PARTS:
            calls.append(openai_call({key: value for key, value in part.items() if key != "type"}))
        elif kind == "refusal":
            kept.append({"type": "text", "text": part.get("refusal")})
        else:
            if calls and has_text(part):
                raise BrokenSample("its text comes after its calls; make them separate messages")
            kept.append(part)
    if calls and message.get("tool_calls"):
        raise BrokenSample("it has calls both in tool_calls and in its content; remove one")
    if calls:
        message["tool_calls"] = calls
    message["content"] = kept
    if not kept and (calls or message.get("tool_calls")):
        message["content"] = None
    elif kept and all(map(is_text, kept)):
        message["content"] = "".join(
            part if isinstance(part, str) else str(text_of(part)) for part in kept
        )
    return "\n\n".join(text for text in reasoning if text.strip())


def _take_refusal(message: Turn) -> None:
    refusal = message.pop("refusal", None)
    if refusal in (None, ""):
        return
    if message.get("content") not in (None, "", [], refusal):
        raise BrokenSample("it has both a content and a refusal; remove one")
    message["content"] = refusal


def _take_calls(message: Turn) -> None:
    """Convert the calls of a message, or the calls between tags at the end of its content."""
    calls = message.get("tool_calls")
    if calls in (None, "", []):
        content = message.get("content")
        if isinstance(content, str) and (tagged := calls_in(content)):
            message["content"] = tagged.text or None
            message["tool_calls"] = [openai_call(call) for call in tagged.calls]
        return
    if isinstance(calls, str):
        with suppress(BrokenSample):  # which `normalize` reports
            calls = from_json(calls, "tool_calls")
    message["tool_calls"] = (
        [openai_call(call) for call in calls] if isinstance(calls, list) else calls
    )

"""Function calls, their results and tools that a row writes as text: Hermes' tags, and Glaive's
transcripts."""

import ast
import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from torchtitan.components.data.finetuning.conversation import BrokenSample, normalize, shortened
from torchtitan.components.data.sources.rows import parse_json

_CALL = r"<tool_call>(?P<{0}>(?:(?!</?tool_call>).)*)</tool_call>"
_CALLS_AT_END = re.compile(rf"(?P<text>.*?)(?P<calls>(?:{_CALL.format('inner')}\s*)+)\Z", re.DOTALL)
_ONE_CALL = re.compile(_CALL.format("inner"), re.DOTALL)
_GLAIVE_CALL = re.compile(r"(?P<text>.*?)<functioncall>(?P<inner>.*)\Z", re.DOTALL)
_GLAIVE_ARGUMENTS = re.compile(
    r"""\s*\{\s*"name":\s*"(?P<name>[^"]+)",\s*"arguments":\s*'(?P<arguments>.*)'\s*\}\s*""",
    re.DOTALL,
)
_RESULTS = re.compile(r"\s*(?:<tool_response>.*?</tool_response>\s*)+", re.DOTALL)
_ONE_RESULT = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_TOOLS = re.compile(r"<tools>((?:(?!</?tools>).)*)</tools>", re.DOTALL)
_GLAIVE_SPEAKER = re.compile(r"(?:\A\s*|\n\n+\s*)(SYSTEM|USER|ASSISTANT|FUNCTION RESPONSE):")
_GLAIVE_ROLES = {
    "SYSTEM": "system",
    "USER": "user",
    "ASSISTANT": "assistant",
    "FUNCTION RESPONSE": "tool",
}
_END = "<|endoftext|>"


class Tagged(NamedTuple):
    """A text that ends with calls."""

    text: str
    """Text before the calls."""
    calls: list[object]


def read_call(text: str) -> object:
    """Parse a function call, or a list of them: JSON, a Python literal, or Glaive's, whose
    arguments are JSON in single quotes. Raise `BrokenSample` for other texts."""
    if glaive := _GLAIVE_ARGUMENTS.fullmatch(text):
        try:
            return {"name": glaive["name"], "arguments": _quoted(glaive["arguments"])}
        except ValueError:
            pass
    try:
        return parse_json(text)
    except ValueError as error:
        literal = _literal(text)
        if literal is None:
            raise BrokenSample(
                f"the function_call must be valid JSON ({error}): {shortened(text)}"
            ) from None
        return literal


def _quoted(text: str) -> object:
    """Parse JSON from between single quotes. Single quotes in it may have backslashes."""
    try:
        return parse_json(text)
    except ValueError:
        return parse_json(text.replace("\\'", "'"))


def _literal(text: str) -> dict[object, object] | list[object] | None:
    """Parse a dictionary or list in Python's syntax; return None for other texts."""
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def has_call_tag(text: str) -> bool:
    """Return whether a text has the opening tag of a call."""
    return "<tool_call>" in text or "<functioncall>" in text


def calls_in(text: str) -> Tagged | None:
    """Return the calls at the end of a text, between Hermes' tags `<tool_call>` or after Glaive's
    `<functioncall>`; None for a text without calls, or with text after them. Raise `BrokenSample`
    for a call that cannot be read."""
    if not has_call_tag(text):
        return None
    if (glaive := _GLAIVE_CALL.fullmatch(text)) and "{" in glaive["inner"]:
        call = read_call(glaive["inner"].replace(_END, "").strip())
        return Tagged(glaive["text"].rstrip(), call if isinstance(call, list) else [call])
    found = _CALLS_AT_END.fullmatch(text)
    if not found:
        return None
    calls: list[object] = []
    for one in _ONE_CALL.finditer(found["calls"]):
        call = read_call(one["inner"].strip())
        calls += call if isinstance(call, list) else [call]
    return Tagged(found["text"].rstrip(), calls)


def results_in(text: str) -> list[dict[str, object]]:
    """Return the results in a text that has only these, between Hermes' tags `<tool_response>`,
    each with its name if it has one; empty for other texts."""
    if not _RESULTS.fullmatch(text):
        return []
    return [_result(one[1].strip()) for one in _ONE_RESULT.finditer(text)]


def _result(text: str) -> dict[str, object]:
    try:
        known = parse_json(text)
    except ValueError:
        known = _literal(text)
    if not isinstance(known, Mapping) or "content" not in known:
        return {"content": text}
    if not {*known} <= {"name", "content", "tool_call_id"}:
        return {"content": text}
    content = known["content"]
    if not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    return {**known, "content": content}


def move_tools(messages: list[object], tools: object) -> tuple[list[object], object]:
    """Return messages without the tools that Hermes' system prompts write between `<tools>` tags,
    and the tools. The other words of the prompt stay. Raise `BrokenSample` if a row's tools differ
    from those."""
    if not messages or not isinstance(messages[0], Mapping) or messages[0].get("role") != "system":
        return messages, tools
    first, others = messages[0], messages[1:]
    content = first.get("content")
    if not isinstance(content, str):
        return messages, tools
    for block in _TOOLS.finditer(content):
        listed = _objects(block[1])
        if not listed:  # the words may mention the tags
            continue
        probe: list[object] = [{"role": "user", "content": ""}]
        written = normalize(probe, listed).tools
        given = normalize(probe, tools).tools
        if given is not None and given != written:
            raise BrokenSample(
                "the tools differ between the column tools and the system prompt; remove one"
            )
        words = (content[: block.start()].rstrip() + "\n" + content[block.end() :].lstrip()).strip()
        return ([{**first, "content": words}, *others] if words else others), written
    return messages, tools


def _objects(text: str) -> list[object]:
    """Parse a list of objects, or objects after each other, in JSON or Python's syntax; empty for
    other texts."""
    text = text.strip()
    found: object = _literal(text)
    if found is None:
        found = _consecutive(text)
    listed = found if isinstance(found, list) else [found]
    if len(listed) == 1 and isinstance(listed[0], list):
        listed = listed[0]
    return listed if all(isinstance(one, Mapping) for one in listed) else []


def _consecutive(text: str) -> list[object]:
    decoder = json.JSONDecoder()
    position = 0
    found = []
    while position < len(text):
        if text[position].isspace() or text[position] == ",":
            position += 1
            continue
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        found.append(value)
    return found


def glaive_turns(text: str) -> list[dict[str, object]] | None:
    """Parse a text such as "USER: Hi\\n\\n\\nASSISTANT: Hello" into turns without end tokens; None
    if it is none."""
    before, *pieces = _GLAIVE_SPEAKER.split(text)
    if before.strip() or "USER" not in pieces[::2]:
        return None
    turns: list[dict[str, object]] = []
    for speaker, piece in zip(pieces[::2], pieces[1::2], strict=True):
        piece = piece.strip().removesuffix(_END).strip()
        turns.append({"role": _GLAIVE_ROLES[speaker], "content": piece})
    return turns


def glaive_system(text: str) -> tuple[str, list[object]]:
    """Return the words of Glaive's system prompt, and the functions that follow them. Raise
    `BrokenSample` if these cannot be read."""
    words, brace, functions = text.strip().removeprefix("SYSTEM:").partition("{")
    if not brace:
        return words.strip(), []
    listed = _objects(brace + functions)
    if not listed:
        raise BrokenSample(
            f"the functions in the column system must be valid JSON: {shortened(brace + functions)}"
        )
    return words.strip(), listed

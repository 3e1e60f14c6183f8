"""Function calls and their results, in any spelling."""

import json
from collections.abc import Mapping
from contextlib import suppress

from torchtitan.components.data.finetuning.calls_in_text import (
    calls_in,
    read_call,
    results_in,
)
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    from_json,
)
from torchtitan.components.data.finetuning.spellings.parts import type_of
from torchtitan.components.data.finetuning.spellings.roles import Turn

_RESULT_PARTS = ("tool_result", "tool-result")

IDS_OF_RESULTS = ("tool_call_id", "tool_use_id", "call_id", "toolCallId")


def openai_calls(functions: object) -> list[object]:
    if isinstance(functions, str):
        if tagged := calls_in(functions):
            return [openai_call(call) for call in tagged.calls]
        functions = read_call(functions)
    listed = functions if isinstance(functions, list) else [functions]
    return [openai_call(call) for call in listed]


def openai_call(call: object) -> object:
    """Return a call in OpenAI's format; an invalid one unchanged."""
    if isinstance(call, str):
        with suppress(BrokenSample):  # which `normalize` reports
            call = from_json(call, "tool call")
    if not isinstance(call, Mapping):
        return call
    wrapper = {key: value for key, value in call.items() if value is not None}
    function = wrapper.get("function", wrapper)
    if isinstance(function, str):
        with suppress(BrokenSample):
            function = from_json(function, "function of a tool call")
    if not isinstance(function, Mapping):
        return call
    function = dict(function)
    name = function.get("name", function.get("toolName"))
    if not isinstance(name, str):
        return call
    keys = [
        key for key in ("arguments", "input", "args", "parameters") if function.get(key) is not None
    ]
    if len(keys) > 1:
        raise BrokenSample(f"a call of {name} has {' and '.join(keys)}; keep one of them")
    arguments = function[keys[0]] if keys else None
    given = next((wrapper[key] for key in ("id", "call_id", "toolCallId") if key in wrapper), None)
    identity = {} if given is None else {"id": given}
    return {**identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def split_results(message: Turn) -> list[Turn]:
    """Return a message as several if it contains results of calls, between tags or as parts."""
    content, role = message.get("content"), message.get("role")
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    if isinstance(content, str) and role in ("tool", "user"):
        results = results_in(content)
        return [{**rest, "role": "tool", **result} for result in results] or [message]
    if not isinstance(content, list) or role not in ("tool", "user"):
        return [message]
    if not any(type_of(part) in _RESULT_PARTS for part in content):
        return [message]
    messages: list[Turn] = []
    for part in content:
        if type_of(part) in _RESULT_PARTS:
            messages.append({**rest, "role": "tool", **_result(part)})
        elif role == "tool":
            raise BrokenSample(f"its content has a part of type {type_of(part)!r} next to results")
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(part)
        else:
            messages.append({**rest, "role": "user", "content": [part]})
    return messages


def _result(part: Mapping[str, object]) -> Turn:
    values = [part[key] for key in ("content", "output", "result") if part.get(key) is not None]
    content = values[0] if values else ""
    if isinstance(content, Mapping) and set(content) == {"type", "value"}:  # Vercel's AI SDK
        content = content["value"]
    is_parts = isinstance(content, list) and all(
        isinstance(one, str) or type_of(one) for one in content
    )
    if not isinstance(content, str) and not is_parts:
        content = json.dumps(content, ensure_ascii=False)
    ids = {key: part[key] for key in IDS_OF_RESULTS if part.get(key) is not None}
    result = {"content": content, **ids}
    name = part.get("name", part.get("toolName"))
    if name is not None:
        result["name"] = name
    if part.get("is_error") or part.get("isError"):
        result["is_error"] = True
    return result

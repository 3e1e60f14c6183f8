"""Checked requests: the bodies of `/v1/completions` and `/v1/chat/completions`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.components.data.finetuning.conversation import (
    IMAGE_PARTS,
    BrokenSample,
    Conversation,
    normalize,
)
from torchtitan.components.generation import Sampling
from torchtitan.components.serving.errors import RequestError
from torchtitan.components.serving.fields import Fields, kind, shown, wrong

Prompt = str | list[int]
"""Text, or token ids."""

_MOST_CHOICES = 128
_MOST_STOPS = 16
_LONGEST_STOP = 256
_MOST_TOP = 20
_COMPLETION_TOKENS = 16  # OpenAI's default
_INT64 = 2**63 - 1
_MOST_TOKENS = 2**31 - 1
_HOTTEST = 100.0
_ROLES = ("developer", "system", "user", "assistant", "tool")

MESSAGE_KEYS = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id"),
        *("reasoning_content", "reasoning", "thinking"),
        *("annotations", "cache_control", "id", "provider_specific_fields"),
    }
)
"""Keys of messages that a template may ignore, and keys of other servers' answers that change
nothing. The template must read all other keys."""

ToolChoice = Literal["none", "auto", "required"]


@dataclass(kw_only=True, slots=True)
class Request:
    """Fields that both endpoints have."""

    model: str
    n: int
    """Choices per prompt."""
    max_tokens: int | None
    """None: up to the end of the context."""
    sampling: Sampling
    seed: int | None
    """None: other random numbers each time."""
    stop: list[str]
    logprobs: bool
    n_top: int
    """Most probable tokens to return per token."""
    stream: bool
    include_usage: bool
    """True if a stream ends with the numbers of tokens."""
    ids_as_tokens: bool
    """True to write tokens as `token_id:5`."""


@dataclass(kw_only=True, slots=True)
class CompletionRequest(Request):
    """Body of `/v1/completions`."""

    prompts: list[Prompt]
    echo: bool
    """True if choices begin with the prompt."""


@dataclass(kw_only=True, slots=True)
class ChatRequest(Request):
    """Body of `/v1/chat/completions`."""

    conversation: Conversation
    tool_choice: ToolChoice
    function: str = ""
    """Function that must be called; empty: any."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the chat template."""
    has_parallel_calls: bool = True
    """False to answer with one call at most."""


def completion_request(body: Mapping[str, object]) -> CompletionRequest:
    """Return the checked body of `/v1/completions`. Raise `RequestError` for a mistake in it."""
    fields = Fields(body)
    n_top = fields.integer("logprobs", 0, _MOST_TOP, None)
    request = CompletionRequest(
        prompts=_prompts(fields.required("prompt")),
        echo=fields.flag("echo"),
        max_tokens=fields.integer("max_tokens", 0, _MOST_TOKENS, _COMPLETION_TOKENS),
        logprobs=n_top is not None,
        n_top=n_top or 0,
        **_shared(fields),
    )
    fields.finish()
    return request


def chat_request(body: Mapping[str, object]) -> ChatRequest:
    """Return the checked body of `/v1/chat/completions`. Raise `RequestError` for a mistake in
    it."""
    fields = Fields(body)
    logprobs = fields.flag("logprobs")
    n_top = fields.integer("top_logprobs", 0, _MOST_TOP, 0)
    if n_top and not logprobs:
        raise RequestError(
            f"top_logprobs is {n_top}, which needs logprobs true", param="top_logprobs"
        )
    conversation = _conversation(fields)
    tool_choice, function = _tool_choice(fields, conversation)
    options = dict(fields.object("chat_template_kwargs"))
    if (effort := fields.any("reasoning_effort")) is not None:
        options["reasoning_effort"] = effort
    request = ChatRequest(
        conversation=conversation,
        tool_choice=tool_choice,
        function=function,
        options=options,
        has_parallel_calls=fields.flag("parallel_tool_calls", True),
        max_tokens=_chat_tokens(fields),
        logprobs=logprobs,
        n_top=n_top or 0,
        **_shared(fields),
    )
    fields.finish()
    return request


def _shared(fields: Fields) -> dict[str, Any]:
    top_k = fields.integer("top_k", -1, _MOST_TOKENS, 0) or 0
    sampling = Sampling(
        temperature=fields.number("temperature", 0, _HOTTEST, 1.0) or 0.0,
        top_p=fields.number("top_p", 0, 1, None),
        top_k=top_k if top_k > 0 else None,
        min_p=fields.number("min_p", 0, 1, None),
    )
    if sampling.top_p == 0:
        raise wrong("top_p", 0, "above 0 and at most 1; for the most probable token, temperature 0")
    stream = fields.flag("stream")
    return {
        "model": fields.text("model"),
        "n": fields.integer("n", 1, _MOST_CHOICES, 1),
        "sampling": sampling,
        "seed": fields.integer("seed", -_INT64, _INT64, None),
        "stop": _stops(fields.any("stop", [])),
        "stream": stream,
        "include_usage": _include_usage(fields, stream),
        "ids_as_tokens": fields.flag("return_tokens_as_token_ids"),
    }


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = Fields(fields.object("stream_options"))
    if fields.any("stream_options") is not None and not stream:
        raise RequestError("stream_options needs stream true", param="stream_options")
    include_usage = options.flag("include_usage")
    options.flag("include_obfuscation")  # ignored: the lengths of pieces are as they are
    options.finish()
    return include_usage


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    what = f"a string, or an array of up to {_MOST_STOPS}"
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong("stop", value, what)
    if len(stops) > _MOST_STOPS:
        raise wrong("stop", value, what)
    for stop in stops:
        if not 0 < len(stop) <= _LONGEST_STOP:
            raise wrong("stop", stop, f"1 to {_LONGEST_STOP} characters")
    return stops


def _prompts(value: object) -> list[Prompt]:
    what = "a string, an array of strings, an array of token ids, or an array of those"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise wrong("prompt", value, f"{what}, not empty")
    if all(isinstance(one, str) for one in value):
        return value
    if all(type(one) is int for one in value):
        return [value]
    for one in value:
        if not isinstance(one, list) or not one or not all(type(token) is int for token in one):
            raise wrong("prompt", value, what)
    return value


def _chat_tokens(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", 1, _MOST_TOKENS, None)
    new = fields.integer("max_completion_tokens", 1, _MOST_TOKENS, None)
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {old} and max_completion_tokens {new}; set one of them",
            param="max_tokens",
        )
    return old if new is None else new


def _conversation(fields: Fields) -> Conversation:
    messages = fields.required("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, "an array of messages, not empty")
    for number, message in enumerate(messages):
        _check_message(message, f"messages[{number}]")
    tools = fields.any("tools", [])
    if not isinstance(tools, list):
        raise wrong("tools", tools, "an array")
    for number, tool in enumerate(tools):
        _check_tool(tool, f"tools[{number}]")
    try:
        # As JSON text, since nulls of schemas are no empty cells of a table here.
        return normalize(messages, json.dumps([*map(_as_declared, tools)]) if tools else None)
    except BrokenSample as error:
        raise RequestError(str(error), param="messages", code="invalid_value") from None


def _check_message(message: object, name: str) -> None:
    if not isinstance(message, dict):
        raise wrong(name, message, f"an object, not {kind(message)}")
    role = message.get("role")
    if role not in _ROLES:
        raise wrong(f"{name}.role", role, f"one of {', '.join(_ROLES)}")
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise wrong(f"{name}.content", content, "a string or an array of parts")
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
            raise RequestError(
                f"{name}.content has a part of type {shown(part['type'])}; this server reads text",
                param=name,
                code="unsupported_field",
            )
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise wrong(f"{name}.content", part, 'parts {"type": "text", "text": …}')


def _check_tool(tool: object, name: str) -> None:
    what = '{"type": "function", "function": {"name": …, "parameters": {…}}}'
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise wrong(name, tool, what)
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(name, tool, what)
    if not isinstance(function.get("parameters"), dict | None):
        raise wrong(f"{name}.function.parameters", function["parameters"], "a JSON schema")
    if function.get("strict"):
        raise RequestError(
            f"{name}.function.strict is true, but arguments are not constrained here; leave it out",
            param=name,
            code="unsupported_field",
        )


def _as_declared(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool without the fields that are null, which are the same as absent ones. Schemas
    keep theirs, such as `"default": null`."""
    function = {key: value for key, value in tool["function"].items() if value is not None}
    return {key: value for key, value in tool.items() if value is not None} | {"function": function}


def _tool_choice(fields: Fields, conversation: Conversation) -> tuple[ToolChoice, str]:
    """Return the choice, and the function that must be called."""
    names = [tool["function"]["name"] for tool in conversation.tools or []]
    choice = fields.any("tool_choice", "auto" if names else "none")
    what = '"none", "auto", "required", or {"type": "function", "function": {"name": …}}'
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str) or name not in names:
            raise wrong("tool_choice", choice, f"{what} with one of tools")
        return "required", name
    if choice not in ("none", "auto", "required"):
        raise wrong("tool_choice", choice, what)
    if choice != "none" and not names:
        raise RequestError(f"tool_choice is {choice}, which needs tools", param="tool_choice")
    return choice, ""

"""Samples of fine-tuning data, the common result of reading all row formats.

A message is a dictionary for transformers' chat templates: `role`, `content`, optionally `name`,
`tool_calls`, `tool_call_id`, and any other keys for the model's own template.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.components.data.sources.rows import kind_of, parse_json
from torchtitan.tools.errors import UserError, suggest

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")

_FLAGS = ("weight", "loss_weight", "loss", "train", "training")
"""Keys of a message that enable or disable training on it."""

_FINE_FLAGS = ("train_detail", "training_detail", "loss_mask", "loss_scale", "mask")
"""Keys that set finer masks or weights, which are not supported."""

_ALL_FLAGS = frozenset((*_FLAGS, *_FINE_FLAGS))

_KEYS = (
    *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"),
    *("thinking", "reasoning", "thought", "thoughts"),
)
"""Keys of messages, some of which `openai_messages` converts. Other keys are passed through unless
they look like misspellings."""

_KNOWN_KEYS = frozenset(_KEYS)

_NOT_OPTIONS = {"messages", "tools", "add_generation_prompt"}
"""Variables of templates that no row may set as an option."""

CONFIGURATIONS_OF_IMAGES = (
    "to train on images, use --config sft_images or lora_images, dpo_images for preferences, "
    "bradley_terry_images for reward models, or grpo_images for rewards"
)
"""Advice for images in data of text."""

_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts with text."""

IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of content parts with an image, which `components.images.rows` replaces."""

IMAGE_PLACE = "\U000f49e1\U000f49e2"
"""Place of an image in a plain text: two characters for private use."""


class BrokenSample(UserError):
    """Unusable row, handled by the loader's `broken` policy."""


class EmptySample(BrokenSample):
    """Row without content, such as an empty answer, handled by the `empty` policy."""


class LossySample(BrokenSample):
    """Row that cannot be trained as it is, handled by the policy of an option, or dropped.

    Args:
        reason: the option, without `--dataloader.`, or another name, for rows that no option keeps.
    """

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Conversation:
    """Messages in order, and the available tools."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call, each `{"type": "function", "function": {"name": …,
    "parameters": …}}`."""
    trained: list[bool | None] = field(default_factory=list)
    """For each message, whether to train on it; None, the default: `train_on` decides."""
    options: dict[str, object] = field(default_factory=dict)
    """Options of the chat template that the row sets, such as `enable_thinking`."""
    images: list[Any] = field(default_factory=list)
    """Images in the order of their places, the parts `{"type": "image"}` of messages whose content
    is a list."""

    def __post_init__(self) -> None:
        self.trained = self.trained or [None] * len(self.messages)
        assert len(self.trained) == len(self.messages)

    def is_answered(self) -> bool:
        """Return False if all trainable messages of the assistant are empty."""
        assistant = [
            message
            for message, flag in zip(self.messages, self.trained, strict=True)
            if flag is not False and message["role"] == "assistant"
        ]
        return not assistant or any(map(has_content, assistant))


@dataclass(slots=True)
class Text:
    """Plain text, trained completely."""

    text: str
    images: list[Any] = field(default_factory=list)
    """Images in the order of their places, each `IMAGE_PLACE` in the text."""


@dataclass(slots=True)
class Pair:
    """Preferred and rejected continuation of a conversation. Both begin with an assistant message.
    For methods that judge single answers, one of the two may be missing: an empty list."""

    prompt: Conversation
    chosen: list[Message]
    rejected: list[Message]
    margin: Any = None


@dataclass(slots=True)
class Prompt:
    """Conversation to be answered, with an optional reference answer."""

    prompt: Conversation
    answer: str | None
    row: dict[str, Any] = field(default_factory=dict, compare=False)
    """All columns of the row."""

    def answer_and_row(self) -> str:
        """Return answer and row as JSON for reward functions. Values that JSON has no type for,
        such as dates, become text."""
        return json.dumps([self.answer, self.row], default=str)


Sample = Conversation | Text | Pair | Prompt


def normalize(messages: object, tools: object = None, options: object = None) -> Conversation:
    """Convert messages in OpenAI's format, as by `openai_messages`, to a conversation for chat
    templates.

    - Content parts (`[{"type": "text", "text": …}, …]`) are joined.
    - JSON text in `arguments` of tool calls is parsed; ids and names stay unchanged.
    - Tables store every key in every object of a column. Null values of the keys of messages
      (except `content`), schemas, and arguments given as objects are therefore dropped, unless the
      called tool's schema requires the argument or lists `null` among its types. In JSON text, null
      values are kept.
    - A message's `weight`, `loss_weight`, `loss`, `train` or `training` (0, 1 or boolean) moves to
      `Conversation.trained`.
    - A bare function, as OpenAI's Responses have it, is wrapped in `{"type": "function",
      "function": …}`.

    Messages and tools are lists or their JSON text, as in a CSV cell, and so is each item; `tools`,
    the callable functions, may also be a single one or None. `options` is an object for the chat
    template, its JSON text or None. Raise `EmptySample` for an empty list, and `BrokenSample` for
    an invalid message, naming its number, from 1."""
    turns = from_json(messages, "messages")
    if not isinstance(turns, list):
        raise BrokenSample(f"messages must be a list, not {kind_of(turns)}")
    if not turns:
        raise EmptySample("there are no messages")
    functions = _tools(tools)
    parameters = {
        tool["function"]["name"]: tool["function"].get("parameters") for tool in functions or []
    }
    normal: list[Message] = []
    trained: list[bool | None] = []
    for number, turn in enumerate(turns, 1):
        if type(turn) is dict and _is_plain(turn):  # as most are
            normal.append(dict(turn))
            trained.append(None)
            continue
        try:
            turn = _object(from_json(turn, "message"), "message")
            normal.append(_message(turn, parameters))
            trained.append(_trained(turn))
        except BrokenSample as error:
            raise BrokenSample(f"message {number}: {error}") from None
    return Conversation(normal, functions, trained, _options(options))


def _options(options: object) -> dict[str, object]:
    if options in (None, "", {}):
        return {}
    known = _object(from_json(options, "chat_template_kwargs"), "chat_template_kwargs")
    if own := known.keys() & _NOT_OPTIONS:
        raise BrokenSample(
            f"chat_template_kwargs has {', '.join(sorted(own))}, which the loader sets itself; "
            "remove it (tools have a column of their own)"
        )
    return {name: value for name, value in known.items() if value is not None}


def from_json(value: object, what: str) -> object:
    """Parse `value` if it is text. Raise `BrokenSample` for invalid JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise BrokenSample(f"the {what} must be valid JSON ({error}): {shortened(value)}") from None


def has_content(message: Message) -> bool:
    """Return whether a normalized message has tool calls, or content or reasoning other than
    whitespace."""
    texts = [message.get(key) or "" for key in ("content", "reasoning_content")]
    return "tool_calls" in message or any(
        not isinstance(text, str) or text.strip() for text in texts
    )


def checked_text(value: object, what: str) -> str:
    """Return `value`. Raise `BrokenSample` if it is not a string."""
    if not isinstance(value, str):
        raise BrokenSample(f"the {what} must be text, not {kind_of(value)}: {shortened(value)}")
    return value


def shortened(value: object) -> str:
    """Shorten the `repr` of a value for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def describe_other_keys(turn: Mapping[str, object]) -> str:
    """Return the keys of a turn for the error message about a missing key: `, but has text`."""
    others = [
        key
        for key, value in turn.items()
        if value is not None and key not in ("role", "from", *_FLAGS)
    ]
    return f", but has {', '.join(others)}" if others else ""


def _is_plain(turn: Mapping[str, object]) -> bool:
    """Return whether a turn has a role and a text, and nothing else."""
    return len(turn) == 2 and isinstance(turn.get("content"), str) and turn.get("role") in ROLES


def _message(turn: Mapping[str, object], parameters: Mapping[str, object]) -> Message:
    message = {key: value for key, value in turn.items() if value is not None and key not in _FLAGS}
    for key in message.keys() - _KNOWN_KEYS:
        if near := suggest(str(key), [*_KEYS, *_FLAGS], cutoff=0.8):
            raise BrokenSample(f"unknown key {key!r}{near}")
    role = message.get("role")
    if role is None:
        raise BrokenSample(f"it has no role{describe_other_keys(turn)}")
    if role not in ROLES:
        raise BrokenSample(f"the role {role!r} is unknown; use one of: {', '.join(ROLES)}")
    if calls := _objects(message.pop("tool_calls", None), "tool_calls"):
        if role != "assistant":
            raise BrokenSample(
                f"a message with role {role!r} has tool_calls, which only the assistant may have"
            )
        message["tool_calls"] = [_tool_call(call, parameters) for call in calls]
    content = message.get("content")
    if content is None and not calls:
        missing = "content and no tool_calls" if role == "assistant" else "content"
        raise BrokenSample(f"the role {role!r} has no {missing}{describe_other_keys(message)}")
    if content is not None:
        message["content"] = _content(content)
    elif "content" in turn:
        message["content"] = None
    return message


def _content(content: object) -> str:
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    return checked_text(content, "content")


def _part(part: object) -> str:
    if isinstance(part, str):
        return checked_text(part, "content")
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind in IMAGE_PARTS:
        raise BrokenSample(
            f"its content has a part of type {kind!r}, and this configuration trains on text; "
            f"{CONFIGURATIONS_OF_IMAGES}"
        )
    if kind not in _TEXT_PARTS or not isinstance(part, Mapping):
        raise BrokenSample(f"its content has a part of type {kind!r}; only text is supported")
    text = next(
        (part[key] for key in ("text", "value", "content") if part.get(key) is not None), None
    )
    if text is None:
        raise BrokenSample(f"a part of its content has no text{describe_other_keys(part)}")
    return checked_text(text, "text of a part")


def _tool_call(call: Mapping[str, object], parameters: Mapping[str, object]) -> dict[str, Any]:
    wrapper = {key: value for key, value in call.items() if value is not None}
    function = _function(wrapper, "tool call")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = _without_nulls(arguments, parameters.get(function["name"]))
    arguments = (
        from_json(arguments, "arguments of a tool call") if arguments not in ("", None) else {}
    )
    function["arguments"] = _object(arguments, "arguments of a tool call")
    if "function" not in wrapper:
        return {"type": "function", "function": function}
    return {**wrapper, "type": "function", "function": function}


def _without_nulls(value: object, schema: object = None) -> object:
    """Return an object without the null values that a table adds to it, in all depths: null stays
    where the schema requires the key or allows null."""
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return [_without_nulls(item, items) for item in value]
    if not isinstance(value, Mapping):
        return value
    known = schema if isinstance(schema, Mapping) else {}
    properties, required = known.get("properties"), known.get("required")
    required = required if isinstance(required, list) else []
    kept = {}
    for key, inside in value.items():
        declared = properties.get(key) if isinstance(properties, Mapping) else None
        if inside is not None or key in required or _allows_null(declared):
            kept[key] = _without_nulls(inside, declared)
    return kept


def _allows_null(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return False
    types = schema.get("type")
    return (
        types == "null"
        or isinstance(types, list)
        and "null" in types
        or schema.get("nullable") is True
    )


def _tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    wrapped = []
    listed = _parsed(tools, "tools")
    for item in [listed] if isinstance(listed, Mapping) else _list(listed or [], "tools"):
        tool = _object(from_json(item, "item of tools"), "item of tools")
        if not isinstance(tools, str) and not isinstance(item, str):
            tool = _object(_without_nulls(tool), "item of tools")
        function = _function(tool, "tool")
        if isinstance(function.get("parameters"), str):
            function["parameters"] = _object(
                from_json(function["parameters"], "parameters"), "parameters"
            )
        is_wrapped = tool.get("function") is not None
        wrapped.append({**(tool if is_wrapped else {"type": "function"}), "function": function})
    return wrapped or None


def _objects(value: object, what: str) -> list[Mapping[str, object]]:
    """Return the objects of a list. It and each item may be JSON text."""
    items = _list(_parsed(value, what) or [], what)
    return [_object(from_json(item, f"item of {what}"), f"item of {what}") for item in items]


def _parsed(value: object, what: str) -> object:
    """Return a cell that may be JSON text; None for blank text."""
    return None if isinstance(value, str) and not value.strip() else from_json(value, what)


def _function(wrapper: Mapping[str, object], what: str) -> dict[str, Any]:
    """Return the function of a tool or tool call, without `type`. The tool or call has a key
    `function`, or is the function itself."""
    function = wrapper.get("function")
    if function is None:
        function = {key: value for key, value in wrapper.items() if key not in ("type", "function")}
    function = dict(_object(from_json(function, f"function of a {what}"), f"function of a {what}"))
    if not isinstance(function.get("name"), str):
        raise BrokenSample(f"a {what} has no name: {shortened(wrapper)}")
    return function


def _trained(turn: Mapping[str, object]) -> bool | None:
    if _ALL_FLAGS.isdisjoint(turn):
        return None
    if fine := [key for key in _FINE_FLAGS if turn.get(key) is not None]:
        raise BrokenSample(
            f"its {fine[0]} is not supported: a message is trained completely or not at all; use a "
            "weight of 1 or 0"
        )
    flags = {key: turn[key] for key in _FLAGS if turn.get(key) is not None}
    for key, value in flags.items():
        if value not in (0, 1):
            raise BrokenSample(
                f"its {key} is {value!r}; it must be 0 or false (not trained), or 1 or true "
                "(trained)"
            )
    values = {bool(value) for value in flags.values()}
    if len(values) > 1:
        raise BrokenSample(
            "its " + " and its ".join(f"{key} is {value!r}" for key, value in flags.items())
        )
    return values.pop() if values else None


def _list(value: object, what: str) -> Sequence[object]:
    if not isinstance(value, list):
        raise BrokenSample(f"the {what} must be a list, not {kind_of(value)}: {shortened(value)}")
    return value


def _object(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise BrokenSample(
            f"the {what} must be an object, not {kind_of(value)}: {shortened(value)}"
        )
    return value

"""One normal form of turns from every spelling in public data.

A message has `role`, `content`, and the assistant's may have `reasoning_content` and `tool_calls`,
as in OpenAI's chat format. Results of calls have the role `tool` and the `tool_call_id` of their
call. `docs/fine_tuning.md` lists the spellings. Invalid turns stay unchanged: `normalize` reports
them.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from torchtitan.components.data.finetuning.calls_in_text import (
    calls_in,
    has_call_tag,
    read_call,
    results_in,
)
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    checked_text,
    describe_other_keys,
    from_json,
    shortened,
)

Turn = dict[str, Any]

_CALL_SPEAKERS = ("function_call", "tool_call")
"""Speakers whose content is one or more function calls in JSON."""

SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "ai", "model", *_CALL_SPEAKERS), "assistant"),
    **{"system": "system", "developer": "developer"},
    **dict.fromkeys(("tool", "observation", "function", "tool_response"), "tool"),
}
"""Speaker in public datasets → role."""

REASONING_KEYS = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "thought",
    "thoughts",
    "analysis",
    "reasoning_details",
)
"""Keys of messages with reasoning: text, or parts with text."""

REASONING_COLUMNS = ("reasoning_content", "reasoning", "thinking", "thought", "thoughts")
"""Columns with the reasoning of an answer in another column."""

_WRITTEN = "written"
"""Key of an answer's text as the row has it, with reasoning between tags, for templates that have
no other place for reasoning."""

OF_COLUMN = "reasoning column"
_OF_ITEM = "reasoning item"
_OF_CALL = "tags before its call"
"""Keys under which an answer carries reasoning from elsewhere, until all its reasoning is
compared."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = (
    "thinking",
    "reasoning",
    "thought",
    "reasoning_text",
    "reasoning.text",
    "reasoning.summary",
    "summary_text",
)
_ENCRYPTED_DETAIL = "reasoning.encrypted"
_HIDDEN_PARTS = ("redacted_thinking", _ENCRYPTED_DETAIL)
_CALL_PARTS = ("tool_use", "tool_call", "tool-call", "function_call")
_RESULT_PARTS = ("tool_result", "tool-result")

_ITEM_ROLES = {
    "function_call": "assistant",
    "reasoning": "assistant",
    "function_call_output": "tool",
}
"""Type of an item of OpenAI's Responses without a role → role of its message."""

_IDS_OF_RESULTS = ("tool_call_id", "tool_use_id", "call_id", "toolCallId")

_LOST_KEYS = (
    *("text", "value", "output", "response", "answer", "final", "completion", "parts"),
    *(
        "cot",
        "chain_of_thought",
        "rationale",
        "scratchpad",
        "reasoning_text",
        "inner_monologue",
        "thinking_content",
    ),
    *("function_calls", "tool_uses", "tool_results", "tool_responses"),
    *("image", "images", "audio", "audios", "video", "videos", "attachments"),
)
"""Keys with content that no template reads."""

_LOST = frozenset(_LOST_KEYS)

_TAGS = (
    *((f"<{name}>", f"</{name}>") for name in ("think", "thinking", "reasoning", "thought")),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_FIRST_OF_TAGS = tuple({opening[0] for opening, _ in _TAGS})
_SOLUTION = re.compile(r"\s*<\|begin_of_solution\|>(.*)<\|end_of_solution\|>\s*", re.DOTALL)


def role_of(turn: object) -> object:
    """Return the role of a turn in any format; None if it has none."""
    if not isinstance(turn, Mapping):
        return None
    speaker = turn.get("role") if turn.get("from") is None else turn["from"]
    if speaker is None:
        kind = turn.get("type")
        return _ITEM_ROLES.get(kind) if isinstance(kind, str) else None
    return SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker


def openai_messages(turns: list[Any]) -> list[object]:
    """Convert turns in any spelling to messages with `role` and `content`.

    Call ids that are missing have nine letters and digits, as some templates require. Raise
    `BrokenSample`, naming the turn from 1, for an unknown speaker, two different reasonings, a
    result that no call asked for, and content that would be lost or moved."""
    reader = _Reader()
    for number, turn in enumerate(turns, 1):
        if isinstance(turn, str):
            with suppress(BrokenSample):  # which `normalize` reports
                turn = from_json(turn, "message")
        try:
            reader.read(turn)
        except BrokenSample as error:
            raise BrokenSample(f"message {number}: {error}") from None
    if reader.reasoning:
        raise BrokenSample(f"message {len(turns)}: its reasoning is followed by no answer")
    return reader.messages


def split_reasoning(text: str) -> tuple[str, str] | None:
    """Return the reasoning between tags at the beginning of a text, and the rest; None if there is
    none, its closing tag is missing, or it has another opening tag inside."""
    start = text.lstrip()
    if start[:1] not in _FIRST_OF_TAGS:
        return None
    for opening, closing in _TAGS:
        if not start.startswith(opening):
            continue
        reasoning, found, rest = start.removeprefix(opening).partition(closing)
        if not found or opening in reasoning:
            return None
        if solution := _SOLUTION.fullmatch(rest):
            rest = solution[1].strip()
        return reasoning.strip(), rest.lstrip()
    return None


def one_reasoning(found: Mapping[str, object]) -> str:
    """Return the reasoning that is the value of each filled key; empty if all keys are empty. Raise
    `BrokenSample` if two differ in more than whitespace."""
    texts = {
        key: _reasoning_text(value, key) for key, value in found.items() if not _is_encrypted(value)
    }
    texts = {key: text for key, text in texts.items() if text.strip()}
    if not texts and (hidden := [key for key, value in found.items() if _is_encrypted(value)]):
        raise _encrypted_error(hidden[0])
    if len({" ".join(text.split()) for text in texts.values()}) > 1:
        raise BrokenSample(f"its reasoning differs between {' and '.join(texts)}; keep one of them")
    return next(iter(texts.values()), "")


def _reasoning_text(value: object, what: str) -> str:
    """Return the text of reasoning: a text, a part, or a list of these. The full text has
    precedence over a summary."""
    if value is None:
        return ""
    if isinstance(value, list):
        readable = [part for part in value if _type_of(part) != _ENCRYPTED_DETAIL]
        texts = [_reasoning_text(part, what) for part in readable]
        return "\n\n".join(text for text in texts if text.strip())
    if not isinstance(value, Mapping):
        return checked_text(value, what)
    keys = ("thinking", "reasoning", "thought", "text", "content", "summary")
    texts = [
        _reasoning_text(value[key], what) for key in keys if value.get(key) not in (None, "", [])
    ]
    if texts:
        return texts[0]
    if value.get("type") in _HIDDEN_PARTS or value.get("encrypted_content"):
        raise _encrypted_error(what)
    return ""


def _is_encrypted(value: object) -> bool:
    """Return whether `reasoning_details` of OpenRouter contain no text."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(_type_of(part) == _ENCRYPTED_DETAIL for part in value)
    )


def _encrypted_error(what: str) -> BrokenSample:
    return BrokenSample(
        f"its reasoning is encrypted ({what}), so it cannot be trained; remove it from the row"
    )


class _Call(NamedTuple):
    id: str
    name: Any


def _is_plain(turn: Mapping[str, object]) -> bool:
    """Return whether a turn is a message as it is, as most are: a role and a text, without
    reasoning, calls and results between tags."""
    role, content = turn.get("role"), turn.get("content")
    if len(turn) != 2 or not isinstance(content, str):
        return False
    if role == "assistant":
        return not (split_reasoning(content) or has_call_tag(content))
    return role == "system" or (role == "user" and not results_in(content))


class _Reader:
    """Converts consecutive turns to messages, and assigns results to function calls."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.reasoning: list[str] = []
        """Reasoning items without their answer so far."""
        self._pending: list[_Call] = []
        """Calls without results; later ones in the same turn of the assistant are appended."""
        self._unanswered: list[_Call] = []
        """Calls of earlier turns without results."""
        self._invented: dict[str, Turn] = {}
        """Calls that had no ids, by the ids given to them."""
        self._ids: set[Any] = set()
        self._n_calls = 0

    def read(self, turn: object) -> None:
        if not isinstance(turn, Mapping):
            self.messages.append(turn)
            return
        if _is_plain(turn) and not self.reasoning:
            self._close()
            self.messages.append(dict(turn))
            return
        message, is_call = _unified(turn)
        role = message.get("role")
        if role != "assistant":
            self._refuse_reasoning(message)
        for one in _split(message):
            if one.get("role") == "tool":
                self._add_result(one)
            elif role == "assistant":
                self._add_answer(one, is_call)
            else:
                self._close()
                self.messages.append(one)

    def _refuse_reasoning(self, message: Turn) -> None:
        if self.reasoning:
            raise BrokenSample(
                f"the reasoning before it is followed by the role {message.get('role')!r}, by no "
                "answer"
            )
        for key in REASONING_KEYS:
            value = message.get(key)
            if value in (None, "", []):
                message.pop(key, None)
            else:
                raise BrokenSample(
                    f"it has {key}, which only the assistant may have: {shortened(value)}"
                )

    def _add_answer(self, message: Turn, is_call: bool) -> None:
        if message.get("type") == "reasoning":
            text = _reasoning_text(dict(message, type=None), "reasoning item")
            self.reasoning += [text] if text.strip() else []
            return
        if self.reasoning:
            message[_OF_ITEM] = "\n\n".join(self.reasoning)
            self.reasoning = []
        answer = _answer(message)
        if is_call and self.messages and _continues(self.messages[-1], answer):
            self._append_calls(self.messages[-1], answer["tool_calls"])
            return
        self._close()
        if isinstance(answer.get("tool_calls"), list):
            answer["tool_calls"] = self._registered(answer["tool_calls"])
        self.messages.append(answer)

    def _append_calls(self, message: Turn, calls: list[Any]) -> None:
        message["tool_calls"] = [*message.get("tool_calls", []), *self._registered(calls)]
        message["content"] = message.get("content") or None
        message.pop(_WRITTEN, None)

    def _close(self) -> None:
        """Assign the following results by their ids only, since the turn of the pending calls is
        over."""
        self._unanswered += self._pending
        self._pending = []

    def _registered(self, calls: list[Any]) -> list[Any]:
        """Return calls with ids, which become pending."""
        if not all(isinstance(call, Mapping) for call in calls):
            return calls
        registered = []
        for call in calls:
            call = dict(call)
            name = (
                call["function"].get("name") if isinstance(call.get("function"), Mapping) else None
            )
            if call.get("id") in (None, ""):
                call["id"] = self._new_id()
                self._invented[call["id"]] = call
            self._ids.add(str(call["id"]))
            self._pending.append(_Call(call["id"], name))
            registered.append(call)
        return registered

    def _new_id(self) -> str:
        while True:
            name = f"call{self._n_calls:05}"
            self._n_calls += 1
            if name not in self._ids:
                return name

    def _add_result(self, message: Turn) -> None:
        given = [message.pop(key) for key in _IDS_OF_RESULTS if message.get(key) not in (None, "")]
        for key in _IDS_OF_RESULTS:
            message.pop(key, None)
        content = message.get("content")
        if isinstance(content, Mapping):
            message["content"] = json.dumps(content, ensure_ascii=False)
        call = self._call_of(given[0] if given else None, message.get("name"), message)
        if call is not None:
            message["tool_call_id"] = call
        self.messages.append(message)

    def _call_of(self, given: object, name: object, message: Turn) -> object:
        """Return the id of the call that a result answers, and mark it as answered; None for a call
        in the text."""
        if given is not None:
            return self._call_by_id(given, message)
        named = [call for call in self._pending if name is None or call.name == name]
        if named:
            self._pending.remove(named[0])
            return named[0].id
        if self._pending:
            names = ", ".join(str(call.name) for call in self._pending)
            raise BrokenSample(
                f"it is a result of {name!r}, which no call asked for (calls without a result: "
                f"{names})"
            )
        if self._ids or not self._follows_text():
            raise BrokenSample(
                f"it is a result that no call asked for: {shortened(message.get('content'))}"
            )
        return None

    def _call_by_id(self, given: object, message: Turn) -> object:
        for calls in (self._pending, self._unanswered):
            if found := [call for call in calls if call.id == given]:
                calls.remove(found[0])
                return given
        nameless = [call for call in self._pending if call.id in self._invented]
        name = message.get("name")
        nameless = [call for call in nameless if name is None or call.name == name]
        if not nameless or given in self._ids:
            raise BrokenSample(
                f"it is the result of the call {given!r}, which no earlier message made or which "
                "has a result already"
            )
        self._pending.remove(nameless[0])
        self._invented.pop(nameless[0].id)["id"] = given
        self._ids.add(given)
        return given

    def _follows_text(self) -> bool:
        """Return whether the last message but results is an answer, whose text may have calls in an
        unknown form."""
        others = [message for message in self.messages if role_of(message) != "tool"]
        return bool(others) and role_of(others[-1]) == "assistant"


def _unified(turn: Mapping[str, object]) -> tuple[Turn, bool]:
    """Return a turn as a message with `role` and `content`, and whether it is a call by itself
    rather than a message of the assistant."""
    speaker, message = turn.get("role"), dict(turn)
    if turn.get("from") is not None:
        speaker = str(message.pop("from"))
        if speaker not in SPEAKERS:
            raise BrokenSample(
                f"the speaker {speaker!r} is unknown; use one of: {', '.join(SPEAKERS)}"
            )
        if "content" not in message and "value" not in message:
            raise BrokenSample(f"it has no value{describe_other_keys(turn)}")
        message["content"] = message.pop("value", message.get("content"))
    kind = message.get("type")
    if speaker is None and isinstance(kind, str):
        return _item(message), kind == "function_call"
    if kind == "message":  # of OpenAI's Responses
        message = {
            key: value for key, value in message.items() if key not in ("type", "id", "status")
        }
    role = role_of(turn)
    if role is not None:
        message["role"] = role
    is_call = speaker in _CALL_SPEAKERS
    functions = message.pop("function_call", None)
    if is_call:
        functions, message["content"] = message.get("content"), None
        if isinstance(functions, str) and (divided := split_reasoning(functions)):
            message[_OF_CALL], functions = divided
    if functions not in (None, "", {}):
        if message.get("tool_calls"):
            raise BrokenSample("it has both tool_calls and a function_call; remove one")
        message["tool_calls"] = _function_calls(functions)
    _refuse_lost_keys(message)
    return message, is_call


def _function_calls(functions: object) -> list[object]:
    if isinstance(functions, str):
        if tagged := calls_in(functions):
            return [_call(call) for call in tagged.calls]
        functions = read_call(functions)
    listed = functions if isinstance(functions, list) else [functions]
    return [_call(call) for call in listed]


def _item(message: Turn) -> Turn:
    """Return the message of an item without a role of OpenAI's Responses."""
    kind = message["type"]
    if kind not in _ITEM_ROLES:
        raise BrokenSample(
            f"an item of type {kind!r} is not supported; use one of: message, "
            f"{', '.join(_ITEM_ROLES)}"
        )
    role = _ITEM_ROLES[kind]
    if kind == "reasoning":
        return {**message, "role": role}
    if kind == "function_call_output":
        return {
            "role": role,
            "tool_call_id": message.get("call_id"),
            "content": message.get("output"),
        }
    call = {"id": message.get("call_id") or message.get("id"), "name": message.get("name")}
    return {
        "role": role,
        "content": None,
        "tool_calls": [_call({**call, "arguments": message.get("arguments")})],
    }


def _refuse_lost_keys(message: Mapping[str, object]) -> None:
    if _LOST.isdisjoint(message):
        return
    for key in _LOST_KEYS:
        value = message.get(key)
        if (
            value not in (None, "", [], {})
            and value != message.get("content")
            and message.get("content") is not None
        ):
            raise BrokenSample(
                f"its key {key!r} looks like content, but no template reads it; move it to "
                "content, reasoning_content or tool_calls, or remove it"
            )


def _call(call: object) -> Any:
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


def _split(message: Turn) -> list[Turn]:
    """Return a message as several if it contains results of calls, between tags or as parts."""
    content, role = message.get("content"), message.get("role")
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    if isinstance(content, str) and role in ("tool", "user"):
        results = results_in(content)
        return [{**rest, "role": "tool", **result} for result in results] or [message]
    if not isinstance(content, list) or role not in ("tool", "user"):
        return [message]
    if not any(_type_of(part) in _RESULT_PARTS for part in content):
        return [message]
    messages: list[Turn] = []
    for part in content:
        if _type_of(part) in _RESULT_PARTS:
            messages.append({**rest, "role": "tool", **_result(part)})
        elif role == "tool":
            raise BrokenSample(f"its content has a part of type {_type_of(part)!r} next to results")
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
        isinstance(one, str) or _type_of(one) for one in content
    )
    if not isinstance(content, str) and not is_parts:
        content = json.dumps(content, ensure_ascii=False)
    ids = {key: part[key] for key in _IDS_OF_RESULTS if part.get(key) is not None}
    result = {"content": content, **ids}
    name = part.get("name", part.get("toolName"))
    if name is not None:
        result["name"] = name
    if part.get("is_error") or part.get("isError"):
        result["is_error"] = True
    return result


def _type_of(part: object) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _answer(message: Turn) -> Turn:
    """Return an assistant's message in the normal form, except for ids of calls."""
    found = {}
    for key in (*REASONING_KEYS, _OF_ITEM, OF_COLUMN, _OF_CALL):
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
    if (
        written
        and not message.get("tool_calls")
        and not _is_filled(found, except_key="tags in its content")
    ):
        message[_WRITTEN] = written
    return message


def _is_filled(found: Mapping[str, object], except_key: str) -> bool:
    return any(value for key, value in found.items() if key != except_key)


def _take_parts(message: Turn) -> str:
    """Move calls from the parts of a message to its calls, keep parts with text; return the
    reasoning."""
    kept: list[object] = []
    calls: list[object] = []
    reasoning = []
    for part in message["content"]:
        kind = _type_of(part)
        if kind in _HIDDEN_PARTS or kind in _REASONING_PARTS:
            if any(map(_has_text, kept)) or calls:
                raise BrokenSample(
                    "its reasoning comes after its text or calls; make them separate messages"
                )
            reasoning.append(_reasoning_text(part, f"part of type {kind!r}"))
        elif kind in _CALL_PARTS:
            calls.append(_call({key: value for key, value in part.items() if key != "type"}))
        elif kind == "refusal":
            kept.append({"type": "text", "text": part.get("refusal")})
        else:
            if calls and _has_text(part):
                raise BrokenSample("its text comes after its calls; make them separate messages")
            kept.append(part)
    if calls and message.get("tool_calls"):
        raise BrokenSample("it has calls both in tool_calls and in its content; remove one")
    if calls:
        message["tool_calls"] = calls
    message["content"] = kept
    if not kept and (calls or message.get("tool_calls")):
        message["content"] = None
    elif kept and all(map(_is_text, kept)):
        message["content"] = "".join(
            part if isinstance(part, str) else _text_of(part) for part in kept
        )
    return "\n\n".join(text for text in reasoning if text.strip())


def _is_text(part: object) -> bool:
    return (
        isinstance(part, str)
        or isinstance(_text_of(part), str)
        and _type_of(part) in (None, *_TEXT_PARTS)
    )


def _has_text(part: object) -> bool:
    text = part if isinstance(part, str) else _text_of(part)
    return isinstance(text, str) and bool(text.strip())


def _text_of(part: object) -> Any:
    keys = ("text", "value", "content")
    return (
        next((part[key] for key in keys if part.get(key) is not None), None)
        if isinstance(part, Mapping)
        else None
    )


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
            message["tool_calls"] = [_call(call) for call in tagged.calls]
        return
    if isinstance(calls, str):
        with suppress(BrokenSample):  # which `normalize` reports
            calls = from_json(calls, "tool_calls")
    message["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else calls


_OWN_KEYS = ("role", "content", "tool_calls", "reasoning_content", _WRITTEN)


def _continues(previous: Any, call: Turn) -> bool:
    """Return whether a call belongs to the message before it, since both are one turn of the
    assistant."""
    if role_of(previous) != "assistant" or call.get("reasoning_content"):
        return False
    if not isinstance(previous.get("content"), str | None):
        return False
    if not isinstance(call.get("tool_calls"), list) or not isinstance(
        previous.get("tool_calls", []), list
    ):
        return False
    others = [
        {key: value for key, value in one.items() if key not in _OWN_KEYS}
        for one in (previous, call)
    ]
    return others[0] == others[1]


_JSON_TYPES = {
    **{
        "str": "string",
        "string": "string",
        "int": "integer",
        "integer": "integer",
        "float": "number",
    },
    **{
        "number": "number",
        "bool": "boolean",
        "boolean": "boolean",
        "dict": "object",
        "object": "object",
    },
    **dict.fromkeys(("list", "array", "tuple", "set"), "array"),
}
"""Type in xLAM's functions → type in a JSON schema."""


def with_parameters(tools: list[Turn] | None) -> list[Turn] | None:
    """Return normalized tools with a JSON schema of their arguments under `parameters`, also if it
    is Anthropic's `input_schema`, the Model Context Protocol's `inputSchema`, or xLAM's table of
    arguments."""
    if tools is None:
        return None
    return [{**tool, "function": _with_parameters(tool["function"])} for tool in tools]


def _with_parameters(function: Turn) -> Turn:
    names = [name for name in ("input_schema", "inputSchema") if function.get(name) is not None]
    if names and function.get("parameters") is None:
        others = {
            key: value for key, value in function.items() if key not in (*names, "parameters")
        }
        function = {**others, "parameters": function[names[0]]}
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping) or not _is_table(parameters):
        return function
    return {**function, "parameters": _schema(parameters)}


def _is_table(parameters: Mapping[str, object]) -> bool:
    """Return whether parameters are xLAM's: a mapping of names to objects with a type, without a
    schema's own keys."""
    return bool(parameters) and all(
        isinstance(_type_of(given), str) for given in parameters.values()
    )


def _schema(table: Mapping[str, Any]) -> Turn:
    """Return the JSON schema of xLAM's arguments, such as {"n": {"type": "int, optional"}}. Types
    that JSON schemas do not have (`List[int]`) keep their words in the description."""
    properties, required = {}, []
    for name, given in table.items():
        written = given["type"]
        words = [word.strip() for word in written.split(",")]
        is_optional = words[-1] == "optional"
        kind = ",".join(words[:-1] if is_optional else words)
        known = _JSON_TYPES.get(kind.partition("[")[0].lower())
        argument = {**given, "type": known or "string"}
        if kind.lower() not in _JSON_TYPES:
            argument["description"] = f"{given.get('description') or ''} ({kind})".strip()
        properties[name] = argument
        if not is_optional and given.get("default") is None:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}

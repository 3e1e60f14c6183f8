"""One turn in any spelling to a message with `role` and `content`."""

from collections.abc import Mapping

from torchtitan.components.data.finetuning.calls_in_text import (
    has_call_tag,
    results_in,
)
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    describe_other_keys,
)
from torchtitan.components.data.finetuning.spellings.answers import OF_CALL
from torchtitan.components.data.finetuning.spellings.calls import openai_call, openai_calls
from torchtitan.components.data.finetuning.spellings.reasoning import split_reasoning
from torchtitan.components.data.finetuning.spellings.roles import (
    CALL_SPEAKERS,
    ITEM_ROLES,
    SPEAKERS,
    Turn,
    role_of,
)

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


def is_plain(turn: Mapping[str, object]) -> bool:
    """Return whether a turn is a message as it is, as most are: a role and a text, without
    reasoning, calls and results between tags."""
    role, content = turn.get("role"), turn.get("content")
    if len(turn) != 2 or not isinstance(content, str):
        return False
    if role == "assistant":
        return not (split_reasoning(content) or has_call_tag(content))
    return role == "system" or (role == "user" and not results_in(content))


def message_of(turn: Mapping[str, object]) -> tuple[Turn, bool]:
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
    is_call = speaker in CALL_SPEAKERS
    functions = message.pop("function_call", None)
    if is_call:
        functions, message["content"] = message.get("content"), None
        if isinstance(functions, str) and (divided := split_reasoning(functions)):
            message[OF_CALL], functions = divided
    if functions not in (None, "", {}):
        if message.get("tool_calls"):
            raise BrokenSample("it has both tool_calls and a function_call; remove one")
        message["tool_calls"] = openai_calls(functions)
    _refuse_lost_keys(message)
    return message, is_call


def _item(message: Turn) -> Turn:
    """Return the message of an item without a role of OpenAI's Responses."""
    kind = message["type"]
    if kind not in ITEM_ROLES:
        raise BrokenSample(
            f"an item of type {kind!r} is not supported; use one of: message, "
            f"{', '.join(ITEM_ROLES)}"
        )
    role = ITEM_ROLES[kind]
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
        "tool_calls": [openai_call({**call, "arguments": message.get("arguments")})],
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

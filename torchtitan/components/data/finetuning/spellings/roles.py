"""Roles of turns, by their speaker or type."""

from collections.abc import Mapping
from typing import Any

Turn = dict[str, Any]

CALL_SPEAKERS = ("function_call", "tool_call")
"""Speakers whose content is one or more function calls in JSON."""

SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "ai", "model", *CALL_SPEAKERS), "assistant"),
    **{"system": "system", "developer": "developer"},
    **dict.fromkeys(("tool", "observation", "function", "tool_response"), "tool"),
}
"""Speaker in public datasets → role."""

ITEM_ROLES = {
    "function_call": "assistant",
    "reasoning": "assistant",
    "function_call_output": "tool",
}
"""Type of an item of OpenAI's Responses without a role → role of its message."""


def role_of(turn: object) -> object:
    """Return the role of a turn in any format; None if it has none."""
    if not isinstance(turn, Mapping):
        return None
    speaker = turn.get("role") if turn.get("from") is None else turn["from"]
    if speaker is None:
        kind = turn.get("type")
        return ITEM_ROLES.get(kind) if isinstance(kind, str) else None
    return SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker

"""Preference pairs from the built-in conversations, for `tiny_assistant.yaml`."""

from typing import Any


def to_pair(row: dict[str, Any]) -> dict[str, Any] | None:
    """Prefer a conversation's last answer to a repetition of the answer before it."""
    *earlier, last = row["messages"]
    answers = [message for message in earlier if message["role"] == "assistant"]
    if not answers or answers[-1]["content"] == last["content"]:
        return None
    return {"chosen": row["messages"], "rejected": [*earlier, answers[-1]]}

"""The reasoning of an answer, in any spelling."""

import re
from collections.abc import Mapping

from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    checked_text,
)
from torchtitan.components.data.finetuning.spellings.parts import type_of

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

REASONING_PARTS = (
    "thinking",
    "reasoning",
    "thought",
    "reasoning_text",
    "reasoning.text",
    "reasoning.summary",
    "summary_text",
)

_ENCRYPTED_DETAIL = "reasoning.encrypted"

HIDDEN_PARTS = ("redacted_thinking", _ENCRYPTED_DETAIL)

_TAGS = (
    *((f"<{name}>", f"</{name}>") for name in ("think", "thinking", "reasoning", "thought")),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)

_FIRST_OF_TAGS = tuple({opening[0] for opening, _ in _TAGS})

_SOLUTION = re.compile(r"\s*<\|begin_of_solution\|>(.*)<\|end_of_solution\|>\s*", re.DOTALL)


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
        key: reasoning_text(value, key) for key, value in found.items() if not _is_encrypted(value)
    }
    texts = {key: text for key, text in texts.items() if text.strip()}
    if not texts and (hidden := [key for key, value in found.items() if _is_encrypted(value)]):
        raise _encrypted_error(hidden[0])
    if len({" ".join(text.split()) for text in texts.values()}) > 1:
        raise BrokenSample(f"its reasoning differs between {' and '.join(texts)}; keep one of them")
    return next(iter(texts.values()), "")


def reasoning_text(value: object, what: str) -> str:
    """Return the text of reasoning: a text, a part, or a list of these. The full text has
    precedence over a summary."""
    if value is None:
        return ""
    if isinstance(value, list):
        readable = [part for part in value if type_of(part) != _ENCRYPTED_DETAIL]
        texts = [reasoning_text(part, what) for part in readable]
        return "\n\n".join(text for text in texts if text.strip())
    if not isinstance(value, Mapping):
        return checked_text(value, what)
    keys = ("thinking", "reasoning", "thought", "text", "content", "summary")
    texts = [
        reasoning_text(value[key], what) for key in keys if value.get(key) not in (None, "", [])
    ]
    if texts:
        return texts[0]
    if value.get("type") in HIDDEN_PARTS or value.get("encrypted_content"):
        raise _encrypted_error(what)
    return ""


def _is_encrypted(value: object) -> bool:
    """Return whether `reasoning_details` of OpenRouter contain no text."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(type_of(part) == _ENCRYPTED_DETAIL for part in value)
    )


def _encrypted_error(what: str) -> BrokenSample:
    return BrokenSample(
        f"its reasoning is encrypted ({what}), so it cannot be trained; remove it from the row"
    )

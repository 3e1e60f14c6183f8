"""Calls of models whose templates show tools, but write no calls. A mark in the prompt tells the
model's notation."""

from torchtitan.components.chat_template.calls import (
    CallMarks,
    CallNotation,
    LiteralArguments,
    NamedCalls,
)
from torchtitan.components.chat_template.literals import Literals

_BEGIN, _END = "<|tool_call_start|>", "<|tool_call_end|>"

_NOTATIONS: dict[str, CallNotation] = {
    # LFM2: `[find(text='x', count=3)]` between the marks, according to its model card.
    "<|tool_list_start|>": NamedCalls(
        opening=_BEGIN,
        begin="",
        middle=r"\s*\(\s*",
        arguments=LiteralArguments(Literals("'", "=", True), ")"),
        around=frozenset([_BEGIN, _END, "[", "]", ",", ")"]),
        before_name=f"{_BEGIN}[",
        after_name="(",
    ),
    # Granite 3: "respond only with <|tool_call|> followed by a JSON list of tools used", says its
    # prompt.
    "<|tool_call|> followed by a JSON list": CallMarks(
        opening="<|tool_call|>",
        closing="",
        name_key="name",
        arguments_key="arguments",
        before_name='<|tool_call|>[{"name": "',
        after_name='", "arguments": ',
    ),
}
"""Part of a prompt with tools → notation of the calls after it."""


def unwritten_calls(prompt: str) -> CallNotation | None:
    """Return the notation of calls after a prompt with tools; None without a known mark."""
    return next((one for mark, one in _NOTATIONS.items() if mark in prompt), None)

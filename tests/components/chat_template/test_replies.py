"""Reasoning and calls in replies: what a template writes is read back, however it is split."""

import json
import random

import pytest

from torchtitan.components.chat_template.calls import CallMarks
from torchtitan.components.chat_template.forms import Tags
from torchtitan.components.chat_template.parts import Piece
from torchtitan.components.chat_template.replies import ReplyReader

HERMES = CallMarks("<tool_call>", "</tool_call>", "name", "arguments", "", "")
BARE = CallMarks("", "", "name", "parameters", "", "")
THINK = [Tags("<think>", "\n", "</think>", "\n\n")]
SCHEMAS: dict[str, dict] = {"add": {}}


def read(reader: ReplyReader, text: str, seed: int | None = None) -> Piece:
    """Read a text whole, or in pieces of random lengths."""
    whole = Piece()
    random_numbers = random.Random(seed)
    while text:
        n = len(text) if seed is None else random_numbers.randint(1, 4)
        pieces = [reader.push(text[:n])]
        text = text[n:]
        whole.calls += pieces[0].calls
        for kind, part in pieces[0].texts.items():
            whole.add(kind, part)
    last = reader.finish()
    whole.calls += last.calls
    for kind, part in last.texts.items():
        whole.add(kind, part)
    return whole


def called(piece: Piece) -> list[tuple[str, dict]]:
    return [(call.name, json.loads(call.arguments)) for call in piece.calls]


ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(
    ("text", "reasoning", "content", "n_calls"),
    [
        ("Hi there.\n ", None, "Hi there.\n ", 0),
        ("<think>\nLet me see.\n</think>\n\nHi", "Let me see.", "Hi", 0),
        ("\n<think>a < b</think>Hi", "a < b", "Hi", 0),
        ("<think>\n\n</think>\n\nHi", None, "Hi", 0),
        ("<think>never ends \n", "never ends", None, 0),
        ("<thin", None, "<thin", 0),
        ("Hi <think>no</think>", None, "Hi <think>no</think>", 0),
        (ONE, None, None, 1),
        (f"Sure.\n\n{ONE}\n{ONE}", None, "Sure.", 2),
        (f"<think>x</think>\n{ONE}", "x", None, 1),
        (f"{ONE} and more", None, f"{ONE} and more", 0),
        ("<tool_call>{oops}</tool_call>", None, "<tool_call>{oops}</tool_call>", 0),
        ('<tool_call>{"name": "add"', None, '<tool_call>{"name": "add"', 0),
        ('<tool_call>{"name": 5}', None, '<tool_call>{"name": 5}', 0),
        ('<tool_call>{"name": "a", "arguments": 5}', None, None, -1),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}', None, None, -1),
        ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}', None, None, 1),
        ("x <tool_cal", None, "x <tool_cal", 0),
        ("<tool_call>" + "[" * 5000, None, None, -1),
    ],
)
def test_a_reply_is_split(text, reasoning, content, n_calls, seed):
    """-1: calls that cannot be read, whose whole text is content."""
    piece = read(ReplyReader(THINK, False, HERMES, SCHEMAS), text, seed)
    expected = text if n_calls < 0 else content
    assert piece.texts.get("reasoning_content") == reasoning
    assert piece.texts.get("content") == expected
    assert len(piece.calls) == max(n_calls, 0)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_prompt_may_open_the_reasoning(seed):
    piece = read(ReplyReader(THINK, True, HERMES, SCHEMAS), f"Hm.\n</think>\n\nHi {ONE}", seed)
    assert piece.texts == {"reasoning_content": "Hm.", "content": "Hi"}
    assert called(piece) == [("add", {"a": 1})]


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize(
    ("text", "n_calls"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', 1),
        ('\n[{"name": "add", "parameters": {}}, {"name": "add", "parameters": {}}]', 2),
        ('{"name": "other", "parameters": {"a": 1}}', 0),
        ('{"a": 1}', 0),
        ('It is {"name": "add", "parameters": {}}', 0),
    ],
)
def test_calls_without_marks_need_a_known_name(text, n_calls, seed):
    piece = read(ReplyReader([], False, BARE, SCHEMAS), text, seed)
    assert len(piece.calls) == n_calls
    assert piece.texts == ({} if n_calls else {"content": text})

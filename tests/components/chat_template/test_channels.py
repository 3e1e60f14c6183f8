"""Replies in channels, against openai-harmony."""

import json
from pathlib import Path

import pytest

from tests.components.chat_template.generic import published
from tests.components.data.finetuning.test_references import harmony_encoding
from torchtitan.components.chat_template.channels import ChannelReader, writes_channels

THINK = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>It is <b> 5 <| 6."
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": "é<"}'
EARLY = " to=functions.now<|channel|>commentary json<|message|>{}"

Parts = tuple[str, str, list[tuple[str, object]]]


def read(text: str, size: int = 0, *, reads_calls: bool = True) -> Parts:
    reader = ChannelReader(reads_calls)
    size = size or len(text) or 1
    starts = range(0, len(text), size)
    parts = [*(reader.push(text[start : start + size]) for start in starts), reader.finish()]
    calls = [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls]
    [reasoning, content] = (
        "".join(part.texts.get(kind, "") for part in parts)
        for kind in ("reasoning_content", "content")
    )
    return reasoning, content, calls


REPLIES = [
    THINK + FINAL,
    THINK + CALL,
    THINK + "<|channel|>commentary<|message|>I will add.<|end|><|start|>assistant" + CALL,
    EARLY,
    THINK + "<|channel|>analysis<|message|>Again.<|end|><|start|>assistant" + FINAL,
    CALL + "<|call|><|start|>assistant" + EARLY,
]


@pytest.mark.slow
@pytest.mark.parametrize("text", REPLIES)
def test_replies_are_read_as_by_openai_harmony(text: str) -> None:
    """Reasoning is the channel `analysis`; other texts without a recipient are content."""
    harmony = pytest.importorskip("openai_harmony")
    encoding = harmony_encoding()
    end = "<|call|>" if "to=functions" in text.rpartition("<|message|>")[0][-60:] else "<|return|>"
    tokens = encoding.encode(text + end, allowed_special="all")
    messages = encoding.parse_messages_from_completion_tokens(tokens, harmony.Role.ASSISTANT)
    reasoning, content, calls = [], [], []
    for message in messages:
        [part] = message.content
        if message.recipient and message.recipient.startswith("functions."):
            calls.append((message.recipient.removeprefix("functions."), json.loads(part.text)))
        else:
            (reasoning if message.channel == "analysis" else content).append(part.text)
    expected = "\n\n".join(reasoning), "\n\n".join(content), calls
    for size in (0, 1, 5):
        assert read(text, size) == expected
        assert read(text + end, size) == expected


@pytest.mark.parametrize("size", [0, 1, 4])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", "", [])),
        ("<|channel|>analysis<|message|>never en", ("never en", "", [])),
        ("<|channel|>fin", ("", "", [])),
        ("No header.", ("", "No header.", [])),
        (CALL.replace("}", ""), ("", CALL.replace("}", ""), [])),
        (CALL.replace("{", "[5, {"), ("", CALL.replace("{", "[5, {"), [])),
        (CALL.replace("é<", r"\ud800"), ("", CALL.replace("é<", r"\ud800"), [])),
        (CALL.replace('"é<"', "1e999"), ("", CALL.replace('"é<"', "1e999"), [])),
    ],
)
def test_replies_that_end_early_or_are_damaged(text: str, expected: Parts, size: int) -> None:
    assert read(text, size) == expected


def test_calls_are_text_if_none_may_be_made() -> None:
    assert read(CALL, reads_calls=False) == ("", '{"a": "é<"}', [])


def test_templates_with_channels(assets: Path) -> None:
    for name, expected in {"openai-gpt-oss-120b": True, "gpt-oss": True, "qwen3": False}.items():
        template, _ = published(name, assets / "templates")
        assert writes_channels(template) is expected

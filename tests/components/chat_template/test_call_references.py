"""Replies read by the marks of templates, against the parsers of the library renderers."""

import json
from pathlib import Path

import pytest

from tests.components.chat_template.test_calls import CALLS, REJECTED, TOOLS, written
from tests.components.data.finetuning.test_references import (
    RENDERERS,
    UNPROMPTED,
    as_transformers,
    with_tokens,
)
from torchtitan.components.chat_template.replies import ReplyFormat
from torchtitan.components.chat_template.stops import Stops

TOKENS = {name: (kind, tokens) for name, (kind, tokens) in RENDERERS.items()} | {
    name: (kind, tokens) for name, (kind, _, tokens) in UNPROMPTED.items()
}
OTHER: dict[str, set[str]] = {
    # Marks inside of text end it there; whitespace around text is dropped.
    **dict.fromkeys(("Qwen-Qwen3-0.6B", "qwen3"), {"marks"}),
    **dict.fromkeys(("GLM-4.6", "MiniMax-M2", "poolside-Laguna-S-2.1"), {"marks", "spaces"}),
    # The same; Python's True and None, which the templates write, stay text.
    **dict.fromkeys(
        ("Qwen3.5-4B", "TRL's nemotron_3_nano", "TRL's nemotron_3_ultra"),
        {"marks", "spaces", "types"},
    ),
    "google-gemma-4-31B-it": {"types"},
}
"""Template → calls that the parser reads as other values than those given to the template."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TOKENS.keys() - {"Kimi-K2-Instruct", "DeepSeek V4"}))
def test_parsers_of_renderers(name: str, assets: Path, tmp_path: Path) -> None:
    renderers = pytest.importorskip("renderers")
    kind, tokens = TOKENS[name]
    template, tokenizer = with_tokens(name, assets / "templates", tokens, tmp_path)
    renderer = renderers.create_renderer(
        as_transformers(tmp_path, template), getattr(renderers, kind)()
    )
    replies, stops = ReplyFormat(template, tokenizer), Stops(template, tokenizer)
    assert replies.calls
    different = set()
    for case, calls in CALLS.items():
        found = written(template, stops, calls, TOOLS)
        if found is None or case in REJECTED.get(name, ()):
            continue
        prompt, text = found
        if not prompt:
            text = text[text.index(replies.calls.opening) :]
        reader = replies.reader(prompt, TOOLS, reads_calls=True)
        mine = [*reader.push(text).calls, *reader.finish().calls]
        ids = tokenizer.encode(text, add_bos=False, add_eos=False, allow_special=True)
        before = tokenizer.encode(prompt, add_bos=False, add_eos=False, allow_special=True)
        parsed = renderer.parse_response(ids, tools=TOOLS, prompt_ids=before or None).tool_calls
        theirs = [(call.name, call.arguments) for call in parsed]
        if (read_calls := [(call.name, json.loads(call.arguments)) for call in mine]) != theirs:
            assert read_calls == calls
            different.add(case)
    assert different == OTHER.get(name, set())

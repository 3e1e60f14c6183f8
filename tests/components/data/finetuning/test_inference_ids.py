"""Ids and masks of conversations with every published template, against inference simulated by
transformers: the ids of its rendering before each turn, and of the finished turn."""

from pathlib import Path
from typing import Any

import pytest

from tests.components.chat_template.generic import published
from tests.components.chat_template.helpers import Message
from tests.components.data.finetuning.test_references import answers, tools_of, turns_in_ids
from tests.components.data.finetuning.test_turns import (
    QUICK,
    ROUNDS,
    SHAPES,
    STOPS,
    encoded,
    inference_prompts,
)
from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.tokenizer import PretrainedTokenizer

CONVERSATIONS = {**SHAPES, "calls in two rounds": ROUNDS}

OF_ASSETS = [name for name in STOPS if not name.startswith("TRL's ")]

OTHER_PROMPT = (
    *("Apriel-1.6-15b-Thinker-fixed", "Cohere2MoE", "MiniMax-M2", "NVIDIA-Nemotron-Nano-v2"),
    *("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"),
    *("llama-cpp-deepseek-r1", "google-gemma-4-31B-it"),
)
"""Templates whose generation prompt opens or closes reasoning, unlike their finished turns, so that
these do not begin with it. `test_turns` checks the parts of such turns."""

NOT_SHOWN: dict[str, tuple[str, ...]] = {
    # An instruction follows the prompt, and none the finished turn.
    "CohereForAI-c4ai-command-r-plus-tool_use": (
        *("call", "call, null", "call, text", "calls", "calls, other order"),
        "calls in two rounds",
    ),
    # A result ends otherwise if it is the last message, as in the prompt for the answer.
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": (
        *("call", "call, null", "calls", "calls, other order", "calls in two rounds"),
    ),
    # The system prompt moves to the last question, which finished turns lack.
    "mistralai-Mistral-Nemo-Instruct-2407": ("developer", "system"),
    # Reasoning is only shown where another key, or the text, has it.
    "HuggingFaceTB-SmolLM3-3B": ("reasoning", "reasoning at the end"),
    "Kimi-K2-Thinking": ("reasoning", "reasoning inside"),
    "LFM2.5-8B-A1B": ("reasoning inside",),
    "poolside-Laguna-S-2.1": ("reasoning inside",),
    "deepseek-ai-DeepSeek-V3.1": (
        *("call, reasoning", "reasoning", "reasoning at the end", "reasoning inside"),
    ),
    **dict.fromkeys(
        ("openai-gpt-oss-120b", "gpt-oss"), ("call, reasoning", "call, text", "reasoning inside")
    ),
    # The first of two answers keeps its block of reasoning in the prompt for the second only.
    **dict.fromkeys(("Qwen-Qwen3-0.6B", "qwen3"), ("two answers",)),
}
"""Template → conversations with a turn that no rendering by transformers, given the messages as
they are, shows after its prompt."""


class Inference:
    """Renderings and ids by transformers."""

    def __init__(self, template: ChatTemplate, tokenizer: PretrainedTokenizer):
        transformers = pytest.importorskip("transformers")
        assert tokenizer.folder is not None
        file = str(tokenizer.folder / "tokenizer.json")
        self._template = template
        self._tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file)

    def ids(self, messages: list[Message], tools: Any, *, finished: bool) -> list[list[int]]:
        """Return the ids of a conversation in each form, before a turn or after finished turns."""
        texts = inference_prompts(self._template, messages, tools, finished=finished)
        encoded = self._tokenizer(sorted(texts), add_special_tokens=False) if texts else {}
        return [*encoded.get("input_ids", [])]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK[:1] else pytest.mark.slow) for n in OF_ASSETS]
)
def test_ids_are_those_of_inference(name: str, assets: Path) -> None:
    template, tokenizer = published(name, assets / "templates")
    inference = Inference(template, tokenizer)
    unconfirmed = set()
    n_checked = 0
    for shape, messages in CONVERSATIONS.items():
        samples = encoded(template, tokenizer, messages)
        if isinstance(samples, BrokenSample):
            continue
        tools, numbers = tools_of(messages), answers(messages)
        turns = sorted(turns_in_ids(samples), key=lambda turn: len(turn[0]))
        if len(turns) != len(numbers):
            assert shape == "two answers"
            continue
        for number, (prompt, completion) in zip(numbers, turns, strict=True):
            if shape != "reasoning inside":
                before = inference.ids(messages[:number], tools, finished=False)
                assert prompt in before or not before, (shape, tokenizer.decode(prompt))
            whole = [*prompt, *completion]
            finished = inference.ids(messages[: number + 1], tools, finished=True)
            # The stop may be in the header of the next message.
            is_shown = any(ids[: len(whole)] == whole or ids == whole[:-1] for ids in finished)
            unconfirmed |= set() if is_shown else {shape}
            n_checked += 1
    assert n_checked >= 5
    if name in OTHER_PROMPT:
        assert unconfirmed
    else:
        assert unconfirmed == {*NOT_SHOWN.get(name, ())}

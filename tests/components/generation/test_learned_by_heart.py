"""Models that learn one conversation by heart repeat it after the template's own prompts, and
stop."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.components.chat_template.generic import published
from tests.components.data.finetuning.test_references import answers, tools_of, turns_in_ids
from tests.components.data.finetuning.test_turns import SHAPES, STOPS
from tests.models.test_llama3 import small_model
from torchtitan.components.chat_template.stops import Stops
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.conversation import normalize
from torchtitan.components.data.finetuning.encoded import EncodedSample
from torchtitan.components.generation.engine import generate
from torchtitan.components.tokenizer import PretrainedTokenizer

STEPS = 150
LEARNED = 0.02
"""Mean loss of a token at which greedy decoding repeats it."""

ENDS = {"Cohere2MoE": "<|START_TEXT|>{}<|END_TEXT|>"}
"""Template → the end of its turns, if it is not the content."""

REASONING = (
    "qwen3",
    "GLM-4.6",
    "Qwen3.5-4B",
    "openai-gpt-oss-120b",
    "MiniMax-M2",
    "NVIDIA-Nemotron-Nano-v2",
    "Cohere2MoE",
    "google-gemma-4-31B-it",
    "deepseek-ai-DeepSeek-V3.1",
    "StepFun3.5-Flash",
    "Apriel-1.6-15b-Thinker-fixed",
    "Kimi-K2-Thinking",
    "poolside-Laguna-S-2.1",
)
"""Templates that write reasoning. GLM ends turns with the header of the next turn, gpt-oss with one
of two tokens, others with one token; some open or close the reasoning in their prompt."""

CALLS = ("GLM-4.6", "openai-gpt-oss-120b", "meetkai-functionary-medium-v3.1")
"""Templates whose calls end otherwise than answers: with the header of a result, or with a token of
their own."""

OF_TEXT = "llama-cpp-rwkv-world"
"""Template whose turns end with text, of several tokens: the next question's beginning."""

PLAIN = (
    "mistralai-Mistral-Nemo-Instruct-2407",
    "meta-llama-Llama-3.2-3B-Instruct",
    "ibm-granite-granite-4.0",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, "reasoning") for name in REASONING),
        *((name, "turns") for name in (*PLAIN, OF_TEXT)),
        *((name, "call") for name in CALLS),
    ],
)
def test_models_repeat_what_they_learned_and_stop(name: str, shape: str, assets: Path) -> None:
    template, tokenizer = published(name, assets / "templates")
    messages, tools = SHAPES[shape], tools_of(SHAPES[shape])
    encoder = ChatEncoder(tokenizer, template, "assistant")
    [samples] = encoder.encode_batch([normalize(messages, tools)])
    assert isinstance(samples, list)
    model = learned(samples, tokenizer)
    # Inference sets the options that the samples are rendered with.
    options = {}
    for sample in samples:
        for option in sample.facts.options:
            key, _, value = option.partition("=")
            options[key] = value == "True"
    stops = Stops(template, tokenizer)
    ends = STOPS.get(name, {*stops.texts()})
    for number, (prompt, completion) in zip(answers(messages), turns_in_ids(samples), strict=True):
        before = normalize(messages[:number], tools, options)
        assert encoder.encode_prompt(before).tolist() == prompt
        written: list[int] = []

        def stops_at_text(row: int, token: int, written: list[int] = written) -> bool:
            written.append(token)
            return any(tokenizer.decode(written).endswith(text) for text in stops.texts())

        [generation] = generate(
            model, [prompt], max_new_tokens=120, stop_ids={*stops.ids()}, on_token=stops_at_text
        )
        assert generation.ids == completion
        assert generation.finish_reason == "stop"
        text = tokenizer.decode(completion)
        stop = next(stop for stop in ends if text.endswith(stop))
        answer = text.removesuffix(stop).rstrip("\n")
        if messages[number].get("tool_calls"):
            assert "miles" in answer
        else:
            assert answer.endswith(ENDS.get(name, "{}").format(messages[number]["content"]))


def learned(samples: Sequence[EncodedSample], tokenizer: PretrainedTokenizer) -> torch.nn.Module:
    """Return a small model that has learned samples by heart."""
    torch.manual_seed(0)
    model = small_model(vocab_size=tokenizer.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = []
    for sample in samples:
        ids, trained = torch.from_numpy(sample.ids), torch.from_numpy(sample.trained)
        rows.append((ids[None, :-1], torch.where(trained, ids, -100)[1:]))
    for _ in range(STEPS):
        losses = [
            torch.nn.functional.cross_entropy(model(ids)[0], targets) for ids, targets in rows
        ]
        if max(losses) < LEARNED:
            break
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    return model.eval()

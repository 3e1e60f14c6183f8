"""Models that learn one conversation by heart repeat it after the template's own prompts, and
stop."""

from pathlib import Path

import pytest
import torch

from tests.components.chat_template.generic import published
from tests.components.data.finetuning.test_references import answers, turns_in_ids
from tests.components.data.finetuning.test_turns import SHAPES, STOPS
from tests.models.test_llama3 import small_model
from torchtitan.components.chat_template.stops import Stops
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.conversation import normalize
from torchtitan.components.generation.engine import generate

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

PLAIN = (
    "mistralai-Mistral-Nemo-Instruct-2407",
    "meta-llama-Llama-3.2-3B-Instruct",
    "ibm-granite-granite-4.0",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REASONING, *PLAIN])
def test_models_repeat_what_they_learned_and_stop(name: str, assets: Path) -> None:
    template, tokenizer = published(name, assets / "templates")
    messages = SHAPES["reasoning" if name in REASONING else "turns"]
    encoder = ChatEncoder(tokenizer, template, "assistant")
    [samples] = encoder.encode_batch([normalize(messages)])
    assert isinstance(samples, list)
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
        sum(losses).backward()
        optimizer.step()
    # Inference sets the options that the samples are rendered with.
    options = {}
    for sample in samples:
        for option in sample.facts.options:
            key, _, value = option.partition("=")
            options[key] = value == "True"
    stop_ids = set(Stops(template, tokenizer).ids())
    for number, (prompt, completion) in zip(answers(messages), turns_in_ids(samples), strict=True):
        assert (
            encoder.encode_prompt(normalize(messages[:number], options=options)).tolist() == prompt
        )
        [generation] = generate(model.eval(), [prompt], max_new_tokens=80, stop_ids=stop_ids)
        assert generation.finish_reason == "stop" and generation.ids == completion
        text = tokenizer.decode(completion)
        stop = next(stop for stop in STOPS[name] if text.endswith(stop))
        end = ENDS.get(name, "{}").format(messages[number]["content"])
        assert text.removesuffix(stop).rstrip("\n").endswith(end)

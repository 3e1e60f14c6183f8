"""Models that learn one conversation by heart repeat it after the template's own prompts, and stop."""

from pathlib import Path

import pytest
import torch

from tests.components.chat_template.generic import published
from tests.components.data.finetuning.test_references import answers, turns_in_ids
from tests.components.data.finetuning.test_turns import SHAPES
from tests.models.test_llama3 import small_model
from torchtitan.components.chat_template.stops import Stops
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.conversation import normalize
from torchtitan.components.generation.engine import generate

STEPS = 150


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stop"), [("qwen3", "<|im_end|>"), ("GLM-4.6", "<|user|>")])
def test_models_repeat_what_they_learned_and_stop(name: str, stop: str, assets: Path) -> None:
    """One template ends turns with a token, the other with the header of the next turn."""
    template, tokenizer = published(name, assets / "templates")
    messages = SHAPES["reasoning"]
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
        losses = [torch.nn.functional.cross_entropy(model(ids)[0], targets) for ids, targets in rows]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    stop_ids = set(Stops(template, tokenizer).ids())
    for number, (prompt, completion) in zip(answers(messages), turns_in_ids(samples), strict=True):
        assert encoder.encode_prompt(normalize(messages[:number])).tolist() == prompt
        [generation] = generate(model.eval(), [prompt], max_new_tokens=80, stop_ids=stop_ids)
        assert generation.finish_reason == "stop" and generation.ids == completion
        assert tokenizer.decode(completion).endswith(messages[number]["content"] + stop)

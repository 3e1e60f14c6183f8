"""Generation with the caches of classes: the same tokens as transformers' own, in batches of
different lengths."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from torchtitan.components.generation import generate
from torchtitan.models.transformers.description import build_class
from torchtitan.models.transformers.generation import ClassCache
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.models.transformers.tiny import tiny_config

NEW = 8


def pair(model_type):
    """A tiny model with large random weights, so that texts differ, and the class with the same
    weights."""
    config = TransformersModel.Config.of(tiny_config(CONFIG_MAPPING[model_type]()).to_dict())
    model, reference = config.build().eval(), build_class(config.transformers_config()).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(std=max(parameter.shape[1:], default=4) ** -0.5)
        state = reference.state_dict()
        for name, tensor in model.state_dict().items():
            tensor.copy_(
                state[name.removeprefix("model.").replace("head.output", model.output_name)]
            )
    return model, reference


def prompts():
    """Texts of different lengths; the longest exceeds the window of 8 tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(8, 64, (length,), generator=generator).tolist() for length in (20, 7, 1)]


@pytest.mark.parametrize(
    "model_type",
    ["llama", "gemma3_text", "qwen3_5_text", "mamba", "gpt_oss", "mixtral", "opt", "falcon_h1"],
)
@pytest.mark.parametrize("use_cache", [True, False])
def test_equals_transformers(model_type, use_cache):
    model, reference = pair(model_type)
    expected = []
    for prompt in prompts():
        tokens = torch.tensor([prompt])
        options = {
            "attention_mask": torch.ones_like(tokens),
            "do_sample": False,
            "eos_token_id": None,
        }
        expected.append(
            reference.generate(tokens, max_new_tokens=NEW, pad_token_id=0, **options)[
                0, len(prompt) :
            ]
        )
    found = generate(model, prompts(), max_new_tokens=NEW, use_cache=use_cache)
    assert [row.ids for row in found] == [row.tolist() for row in expected]


def test_the_class_gets_only_new_tokens(monkeypatch):
    model, _ = pair("lfm2")
    lengths, run = [], ClassCache.run

    def counting(self, model, tokens_BL, *others):
        lengths.append(tokens_BL.shape[1])
        return run(self, model, tokens_BL, *others)

    monkeypatch.setattr(ClassCache, "run", counting)
    model.generation_cache(dict)  # tries a clone
    lengths.clear()
    generate(model, prompts(), max_new_tokens=3)
    assert lengths == [20, 1, 1]


def test_no_cache_where_it_changes_the_text(monkeypatch):
    model, _ = pair("llama")
    expected = [row.ids for row in generate(model, prompts(), max_new_tokens=3, use_cache=False)]
    monkeypatch.setattr("torchtitan.models.transformers.model.has_cache", lambda *_: False)
    assert model.generation_cache(dict) is None
    assert [row.ids for row in generate(model, prompts(), max_new_tokens=3)] == expected

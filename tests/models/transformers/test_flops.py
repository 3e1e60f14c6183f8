"""Operations of classes of transformers: against our families' formula, and 6 per parameter."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from torchtitan.models import llama3, qwen3
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.models.transformers.tiny import tiny_config


def meta_model(model_type, **sizes):
    config = tiny_config(CONFIG_MAPPING[model_type](**sizes))
    with torch.device("meta"):
        return TransformersModel.Config.of(config.to_dict()).build()


def matrices(model):
    return sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)


@pytest.mark.parametrize(("family", "model_type"), [(llama3, "llama"), (qwen3, "qwen3")])
def test_equals_the_formula_of_our_families(family, model_type):
    """Up to norms, which are not products."""
    ours = family.model_registry("debugmodel").model
    ours.vocab_size = 512
    document = family.FORMATS["hf"].to_external(ours)
    with torch.device("meta"):
        own, plain = (
            ours.build(),
            TransformersModel.Config.of({**document, "model_type": model_type}).build(),
        )
    norms = sum(parameter.numel() for parameter in own.parameters() if parameter.ndim == 1)
    assert plain.flops_per_token(600) == own.flops_per_token(600) - 6 * norms


def test_longer_passes_of_recurrent_layers_are_extrapolated():
    """A state-space model has no products between tokens: each matrix is used once per token."""
    model = meta_model("mamba")
    embedding = model.model.get_input_embeddings().weight.numel()
    states = sum(
        p.numel()
        for name, p in model.named_parameters()
        if name.endswith(("A_log", "conv1d.weight"))
    )
    once = 6 * (matrices(model) - (0 if model.is_tied else embedding) - states)
    short, long = model.flops_per_token(64), model.flops_per_token(100_000)
    assert once < long < 1.2 * once and long == pytest.approx(short, rel=0.05)


def test_only_active_experts_count():
    model = meta_model("mixtral")
    experts = sum(p.numel() for p in model.parameters() if p.ndim == 3)
    embedding = model.model.get_input_embeddings().weight.numel()
    attention = 3 * 4 * 64 * 16 * 4 * len(model.blocks())
    assert model.flops_per_token(64) == 6 * (matrices(model) - experts // 2 - embedding) + attention


def test_frozen_weights_need_no_gradient():
    model = meta_model("llama")
    whole, weight = (
        model.flops_per_token(64),
        model.get_parameter("model.model.layers.0.mlp.up_proj.weight"),
    )
    weight.requires_grad_(False)
    assert whole - model.flops_per_token(64) == 2 * weight.numel()
    assert model.requires_grad_(False).flops_per_token(64) == whole / 3


def test_a_class_that_reads_values_is_estimated(caplog):
    model = meta_model("longcat_flash")
    assert model.flops_per_token(64) == 6 * matrices(model)
    assert "estimated" in caplog.text


def test_each_layer_adds_the_same():
    """Layers are independent, so 30 of them need no approximation."""

    def operations(layers: int) -> float:
        sizes = {"num_hidden_layers": layers, "num_experts": 8, "hidden_size": 512}
        with torch.device("meta"):
            model = TransformersModel.Config.of({"model_type": "qwen3_moe", **sizes}).build()
        return model.flops_per_token(2048)

    one, two, many = (operations(layers) for layers in (1, 2, 30))
    assert many == pytest.approx(one + 29 * (two - one), rel=1e-12) and one > 0

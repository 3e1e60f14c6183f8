"""Operations of classes of transformers: against our families' formula, and 6 per parameter."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING

from torchtitan.models import llama3, qwen3
from torchtitan.models.transformers.description import build_class
from torchtitan.models.transformers.flops import (
    _EqualLayers,
    _n_used,
    _WithoutValues,
    forward_flops,
)
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
    """Of 4 experts and 4 that return their input, each token chooses 2."""
    model = meta_model("longcat_flash")
    experts = sum(p.numel() for p in model.parameters() if p.ndim == 3)
    assert model.flops_per_token(64) == 6 * (matrices(model) - experts * (1 - 2 / 8))
    assert "estimated" in caplog.text


def test_all_experts_count_if_the_class_may_choose_any_number():
    """Some configurations have None."""
    with torch.device("meta"):
        plain = build_class(tiny_config(CONFIG_MAPPING["deepseek_v2"]()))
    plain.config.num_experts_per_tok = None
    assert any(p.ndim == 3 for p in plain.parameters())
    assert _n_used(plain) == matrices(plain)


def test_each_layer_adds_the_same():
    """Layers are independent, so 30 of them need no approximation."""

    def operations(layers: int) -> float:
        sizes = {"num_hidden_layers": layers, "num_experts": 8, "hidden_size": 512}
        with torch.device("meta"):
            model = TransformersModel.Config.of({"model_type": "qwen3_moe", **sizes}).build()
        return model.flops_per_token(2048)

    one, two, many = (operations(layers) for layers in (1, 2, 30))
    assert many == pytest.approx(one + 29 * (two - one), rel=1e-12) and one > 0


@pytest.mark.parametrize(
    "model_type",
    [
        "gemma3_text",  # layers with windows and without
        "gemma4_text",  # layers that share keys and values
        "qwen3_next",  # delta nets and attention
        "nemotron_h",  # Mamba, attention and feed-forward layers
    ],
)
def test_equal_layers_count_as_often_as_they_run(model_type):
    config = tiny_config(CONFIG_MAPPING[model_type]())
    with torch.device("meta"):
        plain, each = (build_class(config, "eager").eval().bfloat16() for _ in range(2))
    tokens = torch.zeros(1, 64, dtype=torch.long, device="meta")
    with torch.no_grad(), _WithoutValues(), FlopCounterMode(display=False) as counter:
        each(input_ids=tokens, use_cache=False)
    counted = forward_flops(plain, 64, is_recurrent=False)
    assert 64 * counted == counter.get_total_flops() > 0


def test_equal_layers_run_once():
    config = tiny_config(CONFIG_MAPPING["gemma3_text"]())
    config.num_hidden_layers, config.layer_types = 6, ["sliding_attention", "full_attention"] * 3
    with torch.device("meta"):
        plain = build_class(config, "eager").eval()
    ran = []
    for layer in plain.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, result: ran.append(module))
    forward_flops(plain, 64, is_recurrent=False)
    assert len(ran) == 2  # one of each kind


def test_layers_of_other_widths_and_arguments_differ():
    narrow, wide = nn.Linear(8, 8, device="meta"), nn.Linear(8, 16, device="meta")
    model = nn.Sequential()
    model.layers = nn.ModuleList([narrow, nn.Linear(8, 8, device="meta"), wide])
    layers = _EqualLayers(model)
    rows = torch.empty(3, 8, device="meta")

    def run() -> None:
        for n_rows, layer in zip((3, 2, 3), model.layers, strict=True):
            layer(rows[:n_rows])

    assert layers.count(run) == 2 * 8 * (3 * 8 + 2 * 8 + 3 * 16)


def test_a_layer_that_writes_into_its_arguments_always_runs():
    class Writer(nn.Module):
        def forward(self, written: list[int]) -> None:
            written.append(1)

    model, x_DD = nn.Module(), torch.empty(4, 4, device="meta")
    model.layers = nn.ModuleList([Writer(), Writer()])
    layers = _EqualLayers(model)

    def run() -> None:
        for layer in model.layers:
            written: list[int] = []
            layer(written)
            for _ in written:
                x_DD @ x_DD

    assert layers.count(run) == 2 * (2 * 4**3)

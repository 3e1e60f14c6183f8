"""LFM2 and Nemotron-H: published files and sizes, refusals, packed documents, and operations."""

import dataclasses
import json
from typing import Any

import pytest
import torch

from tests.models.family_cases import (
    difference_with,
    family_of,
    random_reference,
    relative_error,
    to_ours,
)
from tests.models.family_runs import assert_documents_are_apart
from torchtitan.models import granite, lfm2, nemotron_h
from torchtitan.models.common.mamba import Mamba2
from torchtitan.models.common.moe.router import Router
from torchtitan.models.common.short_conv import GatedShortConv
from torchtitan.models.lfm2.model import Lfm2Router
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")

LFM2_1_2B: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_pos_enc": True,
    "vocab_size": 65536,
}
NEMOTRON_8B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
"""With the keys of published files."""


@pytest.mark.parametrize(
    ("document", "family", "flavor"),
    [(LFM2_1_2B, lfm2, "1.2B"), (NEMOTRON_8B, nemotron_h, "8B")],
    ids=["lfm2", "nemotron_h"],
)
def test_published_file_is_read_without_warning(
    document: dict[str, Any], family: Any, flavor: str, caplog: pytest.LogCaptureFixture
) -> None:
    read = family.FORMATS["hf"].from_external
    assert read(document) == family.FLAVORS[flavor]
    assert not caplog.records
    of_transformers_5 = transformers.AutoConfig.for_model(**document).to_dict()
    assert read(of_transformers_5) == family.FLAVORS[flavor]


PUBLISHED = [
    *((lfm2, "350M", 0.354), (lfm2, "700M", 0.742), (lfm2, "1.2B", 1.17), (lfm2, "2.6B", 2.57)),
    *((lfm2, "8B-A1B", 8.34), (nemotron_h, "8B", 8.1), (nemotron_h, "Nano-9B-v2", 8.89)),
    *((nemotron_h, "Nano-12B-v2", 12.3), (nemotron_h, "3-Nano-30B-A3B", 31.6)),
]
"""Billions of parameters on the pages of the models, without a second copy of tied matrices."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "flavor", "billions"), PUBLISHED)
def test_published_sizes(family: Any, flavor: str, billions: float) -> None:
    """The same number in transformers, from our config.json."""
    format, config = family.FORMATS["hf"], family.FLAVORS[flavor]
    document = json.loads(json.dumps(format.to_external(config)))
    with torch.device("meta"):
        parameters = config.build().num_parameters()
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**document)
        )
    assert parameters == theirs.num_parameters()
    assert parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert format.from_external(document) == config


def test_keys_of_older_nemotron_files_count_as_in_transformers() -> None:
    """Also in place of the newer ones."""
    older = {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_dt_min": 0.01}
    document = {**NEMOTRON_8B, **older}
    mamba = nemotron_h.FORMATS["hf"].from_external(document).mamba
    theirs = transformers.AutoConfig.for_model(**document)
    assert (mamba.n_groups, mamba.conv_width, mamba.conv_bias, mamba.least_step) == (
        *(theirs.n_groups, theirs.conv_kernel, theirs.use_conv_bias, theirs.time_step_min),
    )
    assert (mamba.n_groups, mamba.least_step) == (4, 0.01)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            nemotron_h.FLAVORS["moe-debugmodel"],
            {"layer_types": ["dense", "sparse"]},
            r"--model.moe.layer_types is \['dense', 'sparse'\], but must be only sparse",
        ),
        *(
            (config, {"n_shared_experts": 2}, "--model.moe.n_shared_experts is 2, but must be 0")
            for config in (
                nemotron_h.FLAVORS["moe-debugmodel"],
                granite.FLAVORS["moe-debugmodel"],
            )
        ),
    ],
)
def test_options_of_experts_without_an_effect_are_refused(
    config: Any, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(config, moe=dataclasses.replace(config.moe, **change)).validate()


def test_nemotron_with_one_embedding_cannot_be_exported() -> None:
    """transformers gives it an output matrix of its own, for which the export has no values."""
    config = dataclasses.replace(nemotron_h.FLAVORS["debugmodel"], tie_embeddings=True)
    with pytest.raises(UserError, match="no model_type of config.json .* can describe this model"):
        nemotron_h.FORMATS["hf"].to_external(config)


@pytest.mark.parametrize(
    ("document", "change", "message"),
    [
        (LFM2_1_2B, {"full_attn_idxs": 3}, "full_attn_idxs is 3"),
        (LFM2_1_2B, {"layer_types": ["mamba"] * 16}, "layer_types is"),
        (LFM2_1_2B, {"conv_L_cache": 0}, "conv_L_cache is 0"),
        (LFM2_1_2B, {"block_multiple_of": 0}, "block_multiple_of is 0"),
        (LFM2_1_2B, {"num_experts": 4}, "num_experts is 4"),
        (LFM2_1_2B, {"model_type": "lfm2_moe"}, "layer_types is missing"),
        (NEMOTRON_8B, {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern is 'M-X'"),
        (NEMOTRON_8B, {"layers_block_type": ["conv"]}, "layers_block_type is"),
        (NEMOTRON_8B, {"layers_block_type": "mlp"}, "layers_block_type is 'mlp'"),
        (NEMOTRON_8B, {"n_groups": 3}, "mamba.n_groups is 3"),
        (NEMOTRON_8B, {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'"),
        (NEMOTRON_8B, {"sliding_window": 128}, "sliding_window is 128"),
        (
            NEMOTRON_8B,
            {"hybrid_override_pattern": "ME*", "moe_latent_size": 64},
            "moe_latent_size is 64",
        ),
    ],
)
def test_unsupported_models_are_refused_by_name(
    document: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    family = lfm2 if document is LFM2_1_2B else nemotron_h
    with pytest.raises(UserError, match=message) as caught:
        family.FORMATS["hf"].from_external({**document, **change})
    assert "\n" not in str(caught.value)


LAYERS: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "granitemoehybrid, Mamba": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "nemotron_h, experts": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
    },
}
"""Layers of every kind."""


@pytest.mark.parametrize("name", LAYERS)
def test_packed_documents_equal_documents_alone(name: str) -> None:
    """Logits and gradients."""
    model, _ = to_ours(family_of(name), random_reference(name, 2, **LAYERS[name]))
    assert_documents_are_apart(model)


# --- mistakes
# --------------------------------------------------------------------------------------------------


def _exchanged_gates(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, GatedShortConv):
            module.in_b, module.in_c = module.in_c, module.in_b


def _exchanged_keys_and_queries(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, Mamba2):
            module.in_b, module.in_c = module.in_c, module.in_b


def _one_norm_for_all_groups(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, Mamba2):
            module.norm.group_dim = len(module.norm.weight)


@pytest.mark.parametrize(
    ("name", "mistake", "fixed"),
    [
        ("lfm2_moe", _exchanged_gates, {}),
        ("nemotron_h, experts", _exchanged_keys_and_queries, {}),
        ("nemotron_h, experts", _one_norm_for_all_groups, {"n_groups": 4, "mamba_num_heads": 4}),
    ],
)
def test_mistake_is_caught(name: str, mistake: Any, fixed: dict[str, Any]) -> None:
    reference = random_reference(name, 0, **LAYERS[name], **fixed)
    assert difference_with(lambda model: None, reference) < 1e-4
    assert difference_with(mistake, reference) > 1e-3


@pytest.mark.parametrize(("eps", "is_equal"), [(Lfm2Router.eps, True), (Router.eps, False)])
def test_weights_of_small_scores_equal_transformers(
    eps: float, is_equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores near 1e-6, since LFM2 adds this number to their sum."""
    options = {"num_dense_layers": 0, "norm_topk_prob": True, "num_experts_per_tok": 2}
    reference = random_reference("lfm2_moe", 0, **LAYERS["lfm2_moe"], **options)
    model: Any = to_ours(family_of("lfm2_moe"), reference)[0]
    router, gate = model.layers["0"].moe.router, reference.model.layers[0].feed_forward.gate
    monkeypatch.setattr(router, "eps", eps)
    x = torch.randn(50, router.weight.shape[1], generator=torch.Generator().manual_seed(0)) - 14
    n_experts = len(router.weight)
    with torch.no_grad():
        for weight in (router.weight, gate.weight):
            weight.copy_(torch.eye(n_experts, x.shape[1]))  # logits are the first elements of x
        weights, chosen = router(x[None])
        bias = reference.model.layers[0].feed_forward.expert_bias
        _, expected, theirs = gate(x, bias if gate.use_expert_bias else None)

    def by_expert(weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return torch.zeros(50, n_experts).scatter_(1, chosen.view(50, -1), weights.view(50, -1))

    error = relative_error(by_expert(weights, chosen), by_expert(expected, theirs))
    assert error < 1e-5 if is_equal else error > 0.1


def test_operations() -> None:
    """Besides the parameters: scores of attention, and two products with each state; convolutions
    have none."""
    config = lfm2.FLAVORS["350M"]
    with torch.device("meta"):
        model: Any = config.build()
    parameters = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if not name.endswith("norm.weight") and ".conv." not in name
    )
    counted = model.flops_per_token(1000) - 6 * parameters - 3 * 6 * 4 * 16 * 64 * 1000
    assert abs(counted) < 1e-3 * 6 * parameters  # norms and convolutions
    config = nemotron_h.FLAVORS["8B"]
    with torch.device("meta"):
        model = config.build()
    states, attention = 4 * 128 * 64 * 128, 4 * 32 * 128 * 1000
    assert model.score_flops(0, 1000) == states and model.score_flops(1, 1000) == 0
    assert model.score_flops(7, 1000) == attention

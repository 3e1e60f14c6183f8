"""Tiny configurations of transformers classes: what shrinks, what stays, and that they build and
train."""

import copy
import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tests.models.transformers.model_types import CAUSAL, IMAGE_TEXT, default_config
from torchtitan.models.transformers.tiny import HIDDEN, TEXT_IDS, VOCABULARY, WINDOW, tiny_config


def _published(**changes: Any) -> PretrainedConfig:
    """Return a configuration as in published folders: 60 layers of four kinds, old names,
    quantized."""
    values: dict[str, Any] = {
        "model_type": "laguna",
        "num_hidden_layers": 60,
        "num_attention_heads_per_layer": [48, 64, 64] * 20,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 20,
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 58,
        "auto_map": {"AutoConfig": "configuration.Config"},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "eos_token_id": [100_001, 100_002],
        "pad_token_id": 100_001,
        "torch_dtype": "bfloat16",
    }
    return AutoConfig.for_model(**{**values, **changes})


def _scalars(values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the fields that no size determines, sorted."""
    found = []
    for name, value in values.items():
        if isinstance(value, dict) and name not in ("id2label", "quantization_config", "auto_map"):
            found += [(f"{name}.{inner}", item) for inner, item in _scalars(value)]
        elif isinstance(value, (float, bool, str)) and name not in (
            "use_cache",
            "dtype",
            "partial_rotary_factor",
        ):
            found.append((name, value))
    return sorted(found)


def test_one_layer_per_kind_of_a_published_configuration() -> None:
    tiny = tiny_config(_published())
    assert tiny.layer_types == [
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ]
    assert tiny.mlp_layer_types == ["dense", "dense", "sparse", "sparse"]
    assert tiny.num_attention_heads_per_layer == [4, 8, 8, 4]
    assert tiny.num_hidden_layers == 4 and tiny.sliding_window == WINDOW
    assert (tiny.hidden_size, tiny.vocab_size, tiny.dtype) == (HIDDEN, VOCABULARY, None)
    assert not hasattr(tiny, "quantization_config") and not hasattr(tiny, "auto_map")


def test_special_ids_leave_text_and_stay_equal() -> None:
    tiny = tiny_config(_published())
    assert tiny.pad_token_id == tiny.eos_token_id[0] != tiny.eos_token_id[1]
    assert all(TEXT_IDS.stop <= token < VOCABULARY for token in tiny.eos_token_id)


def test_lists_and_counts_of_layers_are_renumbered() -> None:
    lfm2 = AutoConfig.for_model("lfm2", num_hidden_layers=16, full_attn_idxs=[2, 5, 8])
    assert tiny_config(lfm2).layer_types == ["conv", "full_attention"]
    # every 8th layer attends, every second has experts
    jamba = tiny_config(AutoConfig.for_model("jamba"))
    assert jamba.num_hidden_layers == 8 and jamba.layer_types.count("full_attention") == 1
    gemma = AutoConfig.for_model(
        "gemma4_text",
        num_hidden_layers=30,
        num_kv_shared_layers=10,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 6,
    )
    tiny = tiny_config(gemma)
    assert (tiny.num_hidden_layers, tiny.num_kv_shared_layers) == (4, 2)
    assert tiny.layer_types == ["sliding_attention", "full_attention"] * 2
    assert tiny.per_layer_config[1].head_dim == 2 * tiny.per_layer_config[0].head_dim  # 512 and 256


def test_rope_fits_the_heads() -> None:
    qwen = AutoConfig.for_model(
        "qwen2_vl",
        text_config={
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "rope_theta": 1e6,
        },
    )
    assert sum(tiny_config(qwen).text_config.rope_parameters["mrope_section"]) == HIDDEN // 4 // 2
    phi = AutoConfig.for_model(
        "phi3",
        partial_rotary_factor=0.75,
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 36, "long_factor": [2.0] * 36},
    )
    tiny = tiny_config(phi)
    assert len(tiny.rope_parameters["long_factor"]) == 6  # pairs in 3/4 of 16 dimensions
    assert tiny.max_position_embeddings / tiny.original_max_position_embeddings == 32


KINDS = [
    "gemma2",
    "granitemoehybrid",
    "deepseek_v32",
    "nemotron_h",
    "qwen3_next",
    "gpt_oss",
    "dots3_note_text",
]


@pytest.mark.parametrize("model_type", KINDS)
def test_tiny_models_train(model_type: str) -> None:
    config = default_config(model_type)
    before = copy.deepcopy(config.to_dict())
    tiny = tiny_config(config)
    assert config.to_dict() == before
    assert _scalars(tiny.to_dict()) == _scalars(before)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e6
    tokens = torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (2, 3 * WINDOW))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert abs(loss.item() - math.log(VOCABULARY)) < 1  # weights are small at the start
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.slow
def test_scalars_of_all_types_stay() -> None:
    # its defaults refuse themselves
    for model_type in sorted({*CAUSAL, *IMAGE_TEXT} - {"gemma4_assistant"}):
        config = default_config(model_type)
        assert _scalars(tiny_config(config).to_dict()) == _scalars(config.to_dict()), model_type

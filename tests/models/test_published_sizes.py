"""Parameters of models with published config.json files, as their publishers state them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torchtitan.models.pretrained import huggingface_model  # noqa: E402

_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_COMMON = {
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "attention_bias": False,
    "tie_word_embeddings": False,
}

PUBLISHED: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "Kimi K2": (
        {
            **_LATENT,
            "model_type": "kimi_k2",
            "architectures": ["DeepseekV3ForCausalLM"],
            "vocab_size": 163_840,
            "hidden_size": 7168,
            "intermediate_size": 18_432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "q_lora_rank": 1536,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.827,
        },
        1026,
        32,
    ),
    "DeepSeek-V2": (
        {
            **_LATENT,
            "model_type": "deepseek_v2",
            "architectures": ["DeepseekV2ForCausalLM"],
            "vocab_size": 102_400,
            "hidden_size": 5120,
            "intermediate_size": 12_288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 160,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "q_lora_rank": 1536,
            "n_group": 8,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 16.0,
        },
        236,
        21,
    ),
    "MiniMax-M2": (
        {
            "model_type": "minimax_m2",
            "architectures": ["MiniMaxM2ForCausalLM"],
            "vocab_size": 200_064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rotary_dim": 64,
            "use_qk_norm": True,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
        229,
        10,
    ),
    "ERNIE 4.5 300B-A47B": (
        {
            "model_type": "ernie4_5_moe",
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "vocab_size": 103_424,
            "hidden_size": 8192,
            "intermediate_size": 28_672,
            "moe_intermediate_size": 3584,
            "num_hidden_layers": 54,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "moe_num_experts": 64,
            "moe_k": 8,
            "moe_layer_start_index": 3,
            "moe_layer_end_index": 53,
            "moe_layer_interval": 1,
            "moe_num_shared_experts": 0,
        },
        300,
        47,
    ),
    "MiniMax-Text-01": (
        {
            "model_type": "minimax",
            "architectures": ["MiniMaxForCausalLM"],
            "vocab_size": 200_064,
            "hidden_size": 6144,
            "intermediate_size": 9216,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 32,
            "num_experts_per_tok": 2,
            "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10,
        },
        456,
        None,  # its class computes recurrences whose operations are not those of parameters
    ),
    "LongCat-Flash": (
        {
            **_LATENT,
            "model_type": "longcat_flash",
            "architectures": ["LongcatFlashForCausalLM"],
            "vocab_size": 131_072,
            "hidden_size": 6144,
            "ffn_hidden_size": 12_288,
            "expert_ffn_hidden_size": 2048,
            "num_layers": 28,
            "num_attention_heads": 64,
            "q_lora_rank": 1536,
            "n_routed_experts": 512,
            "zero_expert_num": 256,
            "zero_expert_type": "identity",
            "moe_topk": 12,
        },
        560,
        27,
    ),
}
"""Model → what its config.json says of sizes, and billions of parameters and of active ones.
MiniMax-M2 is published as 230 B, with 62 layers."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str, tmp_path: Path) -> None:
    """Active ones are a sixth of the operations for a token without others before it."""
    sizes, billions, active = PUBLISHED[name]
    document = {**_COMMON, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(document))
    spec, _ = huggingface_model(tmp_path)
    with torch.device("meta"):
        model = spec.model.build()
    assert model.num_parameters() / 1e9 == pytest.approx(billions, abs=0.7)
    if active is not None:
        assert model.flops_per_token(1) / 6e9 == pytest.approx(active, abs=1.2)

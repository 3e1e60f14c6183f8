"""Small random models of transformers for every `model_type` that a family here reads, and their
equivalents here."""

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from torchtitan.components.losses.cross_entropy import IGNORE_INDEX
from torchtitan.models.families import families_with
from torchtitan.protocols import BaseModel
from torchtitan.protocols.state_dict_adapter import adapter_for

transformers = pytest.importorskip("transformers")

Options = Mapping[str, Sequence[Any]]
"""Key of config.json → the values to draw from."""

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}

SIZES: Options = {
    "vocab_size": [97],
    "hidden_size": [32, 48],
    "intermediate_size": [40, 64],
    "num_hidden_layers": [1, 3, 4],
    "num_attention_heads": [4],
    "num_key_value_heads": [1, 2, 4],
    "head_dim": [8, 16],
    "max_position_embeddings": [128],
    "rms_norm_eps": [1e-6, 1e-3],
    "tie_word_embeddings": [False, True],
    "rope_parameters": [
        DEFAULT_ROPE,
        LINEAR_ROPE,
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "attention_factor": 1.3,
        },
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 32,
        },
    ],
}
"""Options of all types."""

WINDOWS: Options = {"sliding_window": [3, 16]}

EXPERTS: Options = {
    "num_experts": [4, 7],
    "num_experts_per_tok": [1, 2, 3],
    "moe_intermediate_size": [24, 40],
    "norm_topk_prob": [False, True],
    "decoder_sparse_step": [1, 2],
    "mlp_only_layers": [[], [0]],
}
"""Options of Qwen's types with experts."""

GEMMA: Options = {
    "attention_bias": [False, True],
    "pad_token_id": [None],  # transformers leaves its embedding out of the gradient
}
GEMMA2: Options = {
    **WINDOWS,
    **GEMMA,
    "query_pre_attn_scalar": [16, 256],
    "final_logit_softcapping": [None, 1.5, 30.0],
}
"""Options of Gemma 1, and of 2 and 3."""

PROPORTIONAL_ROPE = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
GEMMA4: Options = {
    **WINDOWS,
    **GEMMA,
    "num_hidden_layers": [1, 3, 6],
    "layer_types": [None, ("full_attention",), ("sliding_attention", "full_attention")],
    "global_head_dim": [8, 24],
    "num_global_key_value_heads": [None, 1, 2, 4],
    "attention_k_eq_v": [False, True],
    "final_logit_softcapping": [None, 1.5, 30.0],
    "rope_parameters": [
        None,
        *(
            {"full_attention": rope, "sliding_attention": DEFAULT_ROPE}
            for rope in SIZES["rope_parameters"]
        ),
        {
            "full_attention": PROPORTIONAL_ROPE,
            "sliding_attention": {**DEFAULT_ROPE, "rope_theta": 1e2},
        },
        {
            "full_attention": {**PROPORTIONAL_ROPE, "partial_rotary_factor": 0.75, "factor": 3.0},
            "sliding_attention": LINEAR_ROPE,
        },
        {
            "full_attention": DEFAULT_ROPE,
            "sliding_attention": {**PROPORTIONAL_ROPE, "partial_rotary_factor": 0.5},
        },
    ],
}

LONG_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.3, 2.0, 4.0, 8.0]}
"""LongRoPE of heads with 4 rotated pairs."""

PARTLY_ROTATED: Options = {
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        {"rope_type": "linear", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 3.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 2.0},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ]
}


_NO_PADDING: Options = {"pad_token_id": [None]}
"""For types with a padding token by default, whose embedding has no gradient in transformers."""

_GRANITE: Options = {
    "attention_bias": [False, True],
    "embedding_multiplier": [1.0, 12.0],
    "attention_multiplier": [1.0, 0.1],
    "residual_multiplier": [1.0, 0.22],
    "logits_scaling": [1.0, 8.0],
}

_GRANITE_MAMBA: Options = {
    "hidden_size": [32, 48],
    "num_hidden_layers": [3, 4],
    "shared_intermediate_size": [40, 64],
    "layer_types": [("mamba", "attention"), ("attention", "mamba", "mamba"), ("attention",)],
    "position_embedding_type": ["rope", None],
    "mamba_n_heads": [4, 8],
    "mamba_n_groups": [1, 2, 4],
    "mamba_d_state": [6, 16],
    "mamba_d_conv": [2, 4],
    "mamba_conv_bias": [False, True],
    "mamba_proj_bias": [False, True],
}

LATENTS: Options = {
    "num_key_value_heads": [4],
    "q_lora_rank": [None, 20],
    "kv_lora_rank": [12, 24],
    "qk_nope_head_dim": [6, 16],
    "qk_rope_head_dim": [8, 4],
    "v_head_dim": [6, 10],
    "attention_bias": [False, True],
    "n_routed_experts": [12],
    "num_experts_per_tok": [1, 3],
    "moe_intermediate_size": [24, 40],
    "n_shared_experts": [1, 2],
    "routed_scaling_factor": [1.0, 2.5],
    "n_group": [2, 4],
    "topk_group": [1, 2],
    "first_k_dense_replace": [0, 1],
    "rope_parameters": [
        *SIZES["rope_parameters"],
        *(
            {
                **{
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 40.0,
                    "original_max_position_embeddings": 16,
                },
                **{"beta_fast": fast, "beta_slow": 1.0, "mscale": mscale, "mscale_all_dim": 0.7},
            }
            for fast in (32.0, 1.0)
            for mscale in (0.7, 1.0)
        ),
    ],
}
"""Options of DeepSeek-V2 and V3."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A `model_type` and the options that its models vary in."""

    model_type: str
    options: Options = field(default_factory=dict)
    without: Sequence[str] = ()
    """Keys of `SIZES` that the type does not have."""
    name: str = ""
    """If a type has several cases; empty: the type."""
    query_norm: float = 1.0
    """Factor of the weights of query norms, for types with large scores, which magnify rounding,
    here and in transformers."""


CASES = {
    case.name or case.model_type: case
    for case in [
        Case(
            model_type="llama", options={"attention_bias": [False, True], "mlp_bias": [False, True]}
        ),
        Case(model_type="mistral", options={"sliding_window": [None, 3, 16]}),
        Case(
            model_type="ministral",
            options={
                **WINDOWS,
                "layer_types": [("sliding_attention", "full_attention"), ("full_attention",)],
            },
        ),
        Case(
            model_type="qwen2",
            options={**WINDOWS, "use_sliding_window": [False, True], "max_window_layers": [0, 2]},
        ),
        Case(
            model_type="qwen3",
            options={
                **WINDOWS,
                "use_sliding_window": [False, True],
                "max_window_layers": [0, 2],
                "attention_bias": [False, True],
            },
        ),
        Case(model_type="gemma", options={**GEMMA, "hidden_act": ["gelu", "gelu_pytorch_tanh"]}),
        Case(
            model_type="gemma2",
            options={
                **GEMMA2,
                "layer_types": [None, ("full_attention",), ("full_attention", "sliding_attention")],
                "attn_logit_softcapping": [None, 1.5, 50.0],
            },
        ),
        Case(
            model_type="gemma3_text",
            options={
                **GEMMA2,
                "num_hidden_layers": [3, 7],
                "layer_types": [None, ("full_attention",), ("sliding_attention", "full_attention")],
                "sliding_window_pattern": [2, 6],
                "rope_parameters": [
                    None,
                    *(
                        {"full_attention": rope, "sliding_attention": DEFAULT_ROPE}
                        for rope in SIZES["rope_parameters"]
                    ),
                    {
                        "full_attention": {**DEFAULT_ROPE, "rope_theta": 1e3},
                        "sliding_attention": LINEAR_ROPE,
                    },
                ],
            },
        ),
        *(
            Case(model_type=model_type, options={**GEMMA4, **own}, query_norm=0.25)
            for model_type, own in {
                "gemma4_text": {"hidden_size_per_layer_input": [0]},
                "gemma4_unified_text": {},
            }.items()
        ),
        Case(
            model_type="gemma4_text",
            name="gemma4_text, small",
            options={
                **GEMMA4,
                "num_hidden_layers": [6],
                "layer_types": [("full_attention",), ("sliding_attention", "full_attention")],
                "hidden_size_per_layer_input": [12, 16],
                "vocab_size_per_layer_input": [97],
                "num_kv_shared_layers": [0, 1, 3, 4],
                "use_double_wide_mlp": [False, True],
                # With a smaller constant, the narrow norms magnify rounding, here and in
                # transformers.
                "rms_norm_eps": [1e-3, 1e-2],
            },
            query_norm=0.25,
        ),
        Case(
            model_type="gemma4_text",
            name="gemma4_text, experts",
            options={
                **GEMMA4,
                "hidden_size_per_layer_input": [0],
                "enable_moe_block": [True],
                "num_experts": [4, 7],
                "top_k_experts": [1, 2, 3],
                "moe_intermediate_size": [24, 40],
            },
            query_norm=0.25,
        ),
        Case(
            model_type="phi3",
            options={
                "hidden_size": [32],
                "sliding_window": [None, 3, 16],
                "original_max_position_embeddings": [16, 32],
                "pad_token_id": [None],
                "rope_parameters": [
                    {"rope_type": "default", "rope_theta": 1e4},
                    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
                    {"rope_type": "longrope", "rope_theta": 1e4, **LONG_FACTORS},
                    {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **LONG_FACTORS},
                    {
                        "rope_type": "longrope",
                        "rope_theta": 1e4,
                        "attention_factor": 1.4,
                        **LONG_FACTORS,
                    },
                    {
                        "rope_type": "longrope",
                        "rope_theta": 1e4,
                        "partial_rotary_factor": 0.75,
                        **{key: factors[:3] for key, factors in LONG_FACTORS.items()},
                    },
                ],
            },
            without=["head_dim"],
        ),
        *(
            Case(
                model_type=model_type,
                options={**PARTLY_ROTATED, "attention_bias": [False, True], "pad_token_id": [None]},
            )
            for model_type in ("glm", "glm4")
        ),
        Case(model_type="olmo2", options={**_NO_PADDING, "attention_bias": [False, True]}),
        Case(
            model_type="olmo3",
            options={
                **WINDOWS,
                **_NO_PADDING,
                "attention_bias": [False, True],
                "layer_types": [
                    None,
                    ("sliding_attention", "full_attention"),
                    ("sliding_attention",),
                    ("full_attention",),
                ],
                "rope_parameters": [
                    {
                        "full_attention": rope,
                        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
                    }
                    for rope in SIZES["rope_parameters"]
                    for theta in (1e4, 1e2)
                ],
            },
        ),
        Case(model_type="granite", options={**_GRANITE, "mlp_bias": [False, True]}),
        Case(
            model_type="granitemoehybrid",
            options={
                **_GRANITE,
                "shared_intermediate_size": [40, 64],
                "num_local_experts": [0],
                "layer_types": [("attention",)],
                "position_embedding_type": ["rope", "nope", None],
                "mamba_n_heads": [4],
            },
        ),
        Case(
            model_type="granitemoehybrid",
            name="granitemoehybrid, Mamba",
            options={**_GRANITE, **_GRANITE_MAMBA, "num_local_experts": [0]},
        ),
        Case(
            model_type="granitemoehybrid",
            name="granitemoehybrid, experts",
            options={
                **_GRANITE,
                **_GRANITE_MAMBA,
                "num_local_experts": [4, 7],
                "num_experts_per_tok": [1, 2, 3],
            },
        ),
        Case(
            model_type="smollm3",
            options={
                **_NO_PADDING,
                "attention_bias": [False, True],
                "mlp_bias": [False, True],
                "no_rope_layers": [None, (1,), (0, 1), (0,)],
                "no_rope_layer_interval": [2, 4],
                "use_sliding_window": [True],
                "sliding_window": [None, 3, 16],
                "layer_types": [None],
            },
        ),
        Case(
            model_type="mixtral",
            options={
                "sliding_window": [None, 3, 16],
                "num_local_experts": [4, 7],
                "num_experts_per_tok": [1, 2],
            },
        ),
        Case(
            model_type="qwen3_moe",
            options={
                **EXPERTS,
                **WINDOWS,
                "use_sliding_window": [False, True],
                "attention_bias": [False, True],
            },
        ),
        Case(
            model_type="qwen2_moe",
            options={
                **EXPERTS,
                "qkv_bias": [False, True],
                "shared_expert_intermediate_size": [24, 40],
            },
            without=["head_dim"],
        ),
        Case(
            model_type="glm4_moe",
            options={
                **PARTLY_ROTATED,
                **_NO_PADDING,
                "attention_bias": [False, True],
                "use_qk_norm": [False, True],
                "n_routed_experts": [12],
                "num_experts_per_tok": [1, 3],
                "moe_intermediate_size": [24, 40],
                "n_shared_experts": [1, 2],
                "routed_scaling_factor": [1.0, 2.5],
                "n_group": [2, 4],
                "topk_group": [1, 2],
                "first_k_dense_replace": [0, 1],
                "norm_topk_prob": [False, True],
            },
        ),
        Case(
            model_type="deepseek_v3",
            options={**LATENTS, "norm_topk_prob": [False, True], "rope_interleave": [False, True]},
            without=["head_dim"],
            query_norm=0.5,
        ),
        Case(
            model_type="deepseek_v2",
            options={**LATENTS, "topk_method": ["greedy", "group_limited_greedy"]},
            without=["head_dim"],
            query_norm=0.5,
        ),
        Case(
            model_type="qwen3_5_text",
            options={
                "head_dim": [16, 24],
                # With a smaller constant, norms in delta nets magnify rounding, here and in
                # transformers.
                "rms_norm_eps": [3e-2, 1e-1],
                "attention_bias": [False, True],
                "layer_types": [
                    None,
                    ("linear_attention", "full_attention"),
                    ("full_attention", "linear_attention"),
                    ("full_attention",),
                ],
                "partial_rotary_factor": [0.25, 0.5, 1.0],
                "linear_num_key_heads": [1, 2],
                "linear_num_value_heads": [2, 4],
                "linear_key_head_dim": [8, 10],
                "linear_value_head_dim": [8, 12],
                "linear_conv_kernel_dim": [2, 4],
            },
        ),
    ]
}
_QWEN_3_5_MOE: Options = {
    "num_experts": [4, 7],
    "num_experts_per_tok": [1, 2, 3],
    "moe_intermediate_size": [24, 40],
    "shared_expert_intermediate_size": [24, 40],
    # With attention, without which transformers has no length of the cache.
    "num_hidden_layers": [2, 4],
    "layer_types": [("linear_attention", "full_attention"), ("full_attention",)],
}
CASES["qwen3_5_moe_text"] = Case(
    model_type="qwen3_5_moe_text",
    options={**CASES["qwen3_5_text"].options, **_QWEN_3_5_MOE},
    without=["intermediate_size"],
)
CASES["qwen3_next"] = Case(
    model_type="qwen3_next",
    options={
        **CASES["qwen3_5_moe_text"].options,
        **{name: EXPERTS[name] for name in ("norm_topk_prob", "decoder_sparse_step")},
        "mlp_only_layers": [[], [0]],
    },
)
_LATENT_SIZES = ("num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")
_LATENT_SIZES += ("qk_rope_head_dim", "v_head_dim", "attention_bias")
_NETS: Options = {
    name: values
    for name, values in CASES["qwen3_5_text"].options.items()
    if name.startswith("linear_")
}
CASES["olmo_hybrid"] = Case(
    model_type="olmo_hybrid",
    options={
        **_NETS,
        **_NO_PADDING,
        # With a smaller constant, norms magnify rounding, here and in transformers.
        "rms_norm_eps": [3e-2, 1e-1],
        "attention_bias": [False, True],
        "linear_allow_neg_eigval": [False, True],
        "num_hidden_layers": [2, 4],
        "layer_types": [None, ("linear_attention", "full_attention")],
        "rope_parameters": [
            {"rope_type": "default", "rope_theta": None},
            *SIZES["rope_parameters"],
        ],
    },
    without=["head_dim"],
)
CASES["kimi_linear"] = Case(
    model_type="kimi_linear",
    options={
        **_NO_PADDING,
        **{name: LATENTS[name] for name in _LATENT_SIZES},
        # With a smaller constant, norms in delta nets magnify rounding, here and in transformers.
        "rms_norm_eps": [3e-2, 1e-1],
        "tie_word_embeddings": [False],
        "num_hidden_layers": [2, 4],
        "layer_types": [("linear_attention", "full_attention"), ("full_attention",)],
        "linear_num_heads": [2, 4],
        "linear_head_dim": [8, 10],
        "linear_conv_kernel_dim": [2, 4],
        "num_local_experts": [12],
        "moe_intermediate_size": [24, 40],
        "n_shared_experts": [1, 2],
        "routed_scaling_factor": [1.0, 2.5],
        "num_experts_per_tok": [1, 3],
        "norm_topk_prob": [False, True],
        "n_group": [2, 4],
        "topk_group": [1, 2],
        "mlp_layer_types": [None, ("sparse",), ("sparse", "dense")],
    },
    without=["head_dim", "rope_parameters"],
    query_norm=0.5,
)
CASES["lfm2"] = Case(
    model_type="lfm2",
    options={
        **_NO_PADDING,
        "num_hidden_layers": [3, 4],
        "layer_types": [
            ("conv", "full_attention"),
            ("full_attention", "conv", "conv"),
            ("full_attention",),
        ],
        "norm_eps": [1e-6, 1e-3],
        "conv_L_cache": [2, 3, 4],
        "conv_bias": [False, True],
        "block_auto_adjust_ff_dim": [False, True],
        "block_multiple_of": [8],
        "block_ffn_dim_multiplier": [None, 1.0, 1.5],
    },
    without=["head_dim", "rms_norm_eps"],
)
CASES["lfm2_moe"] = Case(
    model_type="lfm2_moe",
    options={
        **{key: CASES["lfm2"].options[key] for key in ("pad_token_id", "layer_types", "norm_eps")},
        "conv_L_cache": [2, 3, 4],
        "conv_bias": [False, True],
        "num_hidden_layers": [3, 4],
        "num_dense_layers": [0, 1],
        "num_experts": [4, 7],
        "num_experts_per_tok": [1, 2, 3],
        "moe_intermediate_size": [24, 40],
        "use_expert_bias": [False, True],
        "norm_topk_prob": [False, True],
        "routed_scaling_factor": [1.0, 2.5],
    },
    without=["head_dim", "rms_norm_eps"],
)
_NEMOTRON: Options = {
    **_NO_PADDING,
    "hidden_size": [32, 48],
    "num_hidden_layers": [4, 5],
    "tie_word_embeddings": [False],
    "layer_norm_epsilon": [1e-6, 1e-3],
    "mlp_bias": [False, True],
    "mamba_num_heads": [4, 8],
    "mamba_head_dim": [6, 8],
    "n_groups": [1, 2, 4],
    "ssm_state_size": [6, 16],
    "conv_kernel": [2, 4],
    "use_conv_bias": [False, True],
    "use_bias": [False, True],
}
CASES["nemotron_h"] = Case(
    model_type="nemotron_h",
    options={
        **_NEMOTRON,
        "layers_block_type": [
            ("linear_attention", "mlp", "full_attention"),
            ("full_attention", "linear_attention"),
        ],
    },
    without=["rms_norm_eps", "rope_parameters"],
)
CASES["nemotron_h, experts"] = Case(
    model_type="nemotron_h",
    name="nemotron_h, experts",
    options={
        **_NEMOTRON,
        "layers_block_type": [
            ("linear_attention", "moe", "full_attention", "mlp"),
            ("full_attention", "moe", "linear_attention"),
        ],
        "n_routed_experts": [12],
        "num_experts_per_tok": [1, 3],
        "moe_intermediate_size": [24, 40],
        "moe_shared_expert_intermediate_size": [24, 40],
        "routed_scaling_factor": [1.0, 2.5],
        "n_group": [2, 4],
        "topk_group": [1, 2],
        "norm_topk_prob": [False, True],
    },
    without=["rms_norm_eps", "rope_parameters"],
)
_UNTRUNCATED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
CASES["gpt_oss"] = Case(
    model_type="gpt_oss",
    options={
        **WINDOWS,
        "attention_bias": [False, True],
        "num_local_experts": [4, 7],
        "num_experts_per_tok": [1, 2, 3],
        "layer_types": [None, ("full_attention",), ("full_attention", "sliding_attention")],
        "rope_parameters": [
            None,
            *SIZES["rope_parameters"],
            {**_UNTRUNCATED, "factor": 4.0},
            {**_UNTRUNCATED, "factor": 8.0, "beta_fast": 8.0, "beta_slow": 2.0},
        ],
    },
)
CASES["seed_oss"] = Case(
    model_type="seed_oss",
    options={**_NO_PADDING, "attention_bias": [False, True], "mlp_bias": [False, True]},
)
_EXAONE: Options = {
    **_NO_PADDING,
    "layer_types": [None, ("full_attention",), ("sliding_attention", "full_attention")],
    "sliding_window_pattern": [2, 4],
}
CASES["exaone4"] = Case(
    model_type="exaone4",
    options={**_EXAONE, "layer_types": _EXAONE["layer_types"][1:], "sliding_window": [None, 3, 16]},
)
CASES["exaone_moe"] = Case(
    model_type="exaone_moe",
    options={
        **_EXAONE,
        **WINDOWS,
        "num_experts": [12],
        "num_experts_per_tok": [1, 3],
        "moe_intermediate_size": [24, 40],
        "num_shared_experts": [1, 2],
        "routed_scaling_factor": [1.0, 2.5],
        "n_group": [1, 4],
        "topk_group": [1],
        "norm_topk_prob": [False, True],
        "first_k_dense_replace": [0, 1],
        "mlp_layer_types": [None, ("dense", "sparse")],
    },
)
CASES["ernie4_5"] = Case(model_type="ernie4_5", options=_NO_PADDING)
CASES["ernie4_5_moe"] = Case(
    model_type="ernie4_5_moe",
    options={
        **_NO_PADDING,
        "moe_num_experts": [4, 7],
        "moe_k": [1, 2, 3],
        "moe_intermediate_size": [24, 40],
        "moe_num_shared_experts": [0, 1, 2],
        "moe_layer_start_index": [0, 1],
        "moe_layer_end_index": [-1, 2],
        "moe_layer_interval": [1, 2],
    },
)
_HUNYUAN: Options = {
    **_NO_PADDING,
    "attention_bias": [False, True],
    "rope_parameters": [
        *SIZES["rope_parameters"],
        {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 1.0, "alpha": 50.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0},
    ],
}
CASES["hunyuan_v1_dense"] = Case(model_type="hunyuan_v1_dense", options=_HUNYUAN)
CASES["hunyuan_v1_moe"] = Case(
    model_type="hunyuan_v1_moe",
    options={**_HUNYUAN, "num_experts": [4, 7], "moe_topk": [1, 2, 3]},
)
_TEMPERED: Options = {
    "pad_token_id": [None],
    "rope_parameters": [
        {**rope, "llama_4_scaling_beta": growth}
        for rope in SIZES["rope_parameters"]
        if rope["rope_type"] == "yarn"
        for growth in (0.0, 0.1, 1.0)
    ],
}
CASES["ministral3"] = Case(
    model_type="ministral3", options={**_TEMPERED, "sliding_window": [None, 3, 16]}
)
CASES["glm4_moe_lite"] = Case(
    model_type="glm4_moe_lite",
    options={
        **{key: values for key, values in LATENTS.items() if key != "first_k_dense_replace"},
        **_NO_PADDING,
        "mlp_layer_types": [None, ("sparse",), ("dense", "sparse")],
        "norm_topk_prob": [False, True],
        "rope_interleave": [False, True],
    },
    without=["head_dim"],
    query_norm=0.5,
)
CASES["mistral4"] = Case(
    model_type="mistral4",
    options={
        **LATENTS,
        **_NO_PADDING,
        "rope_parameters": [
            {**rope, "llama_4_scaling_beta": growth}
            for rope in LATENTS["rope_parameters"]
            if rope["rope_type"] == "yarn"
            for growth in (0.0, 0.1, 1.0)
        ],
        "n_group": [1],
        "topk_group": [1],
        "norm_topk_prob": [False, True],
        "rope_interleave": [False, True],
    },
    without=["head_dim"],
    query_norm=0.5,
)
_SPARSE: Options = {
    **{key: values for key, values in LATENTS.items() if key != "q_lora_rank"},
    **_NO_PADDING,
    "q_lora_rank": [16, 20],
    "norm_topk_prob": [False, True],
    # One choice is all tokens of the test.
    "index_topk": [3, 12, 64],
    # So many that hardly any score is 0, since topk chooses among equal ones by chance.
    "index_n_heads": [16],
    "index_head_dim": [8, 12],
}
CASES |= {
    name: Case(model_type=name, options=_SPARSE, without=["head_dim"], query_norm=0.5)
    for name in ("deepseek_v32", "glm_moe_dsa")
}
CASES["glm_moe_dsa, shared"] = Case(
    model_type="glm_moe_dsa",
    name="glm_moe_dsa, shared",
    options={
        **_SPARSE,
        "num_hidden_layers": [3, 4],
        "indexer_types": [("full", "shared"), ("full", "shared", "shared")],
    },
    without=["head_dim"],
    query_norm=0.5,
)
CASES["minimax_m2"] = Case(
    model_type="minimax_m2",
    options={
        **PARTLY_ROTATED,
        "num_local_experts": [4, 7],
        "num_experts_per_tok": [1, 2, 3],
        "rotary_dim": [None, 4],
    },
)
CASES["llama4_text"] = Case(
    model_type="llama4_text",
    options={
        # Others have a factor of queries and keys, which norms would remove.
        "rope_parameters": [
            rope for rope in SIZES["rope_parameters"] if rope["rope_type"] != "yarn"
        ],
        "attention_bias": [False, True],
        "num_local_experts": [4, 7],
        "num_experts_per_tok": [1, 2],
        "intermediate_size_mlp": [24, 56],
        "attention_chunk_size": [3, 16],
        "floor_scale": [4, 9],
        "attn_scale": [0.1, 1.0],
        "attn_temperature_tuning": [False, True],
        "use_qk_norm": [False, True],
        "no_rope_layers": [None, (1,), (0, 1)],
        "layer_types": [None],
        "no_rope_layer_interval": [2, 4],
        "moe_layers": [None, [], [0]],
        "interleave_moe_layer_step": [1, 2],
    },
)

WITH_VISION = {"gemma3", "llama4", "qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_unified"}
"""Types whose language model is read, and written as another type."""

ALIASES = {"kimi_k2"}
"""Types without a class in transformers, read as another type."""


def class_of(config: Any) -> Any:
    """Return the class of transformers for text of a configuration; `AutoModelForCausalLM` does not
    know Mistral 4."""
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    # Not `.keys()`, which imports the configurations of all types.
    is_known = type(config) in known
    return known[type(config)] if is_known else transformers.Mistral4ForCausalLM


def random_reference(name: str, seed: int, **fixed: Any) -> Any:
    """Return transformers' model of a random configuration of a case, with weights that make every
    part matter: norms and biases that differ from their initial values, and attention that is far
    from uniform."""
    case, choose = CASES[name], random.Random(f"{name} {seed}")
    options = {key: values for key, values in SIZES.items() if key not in case.without} | dict(
        case.options
    )
    # Copied, since transformers changes them.
    document = (
        copy.deepcopy({key: choose.choice(values) for key, values in sorted(options.items())})
        | fixed
    )
    n_layers = document["num_hidden_layers"]
    for key, value in document.items():
        if isinstance(value, tuple):  # a pattern of layers
            document[key] = [value[index % len(value)] for index in range(n_layers)]
    # it changes nested values
    config = transformers.AutoConfig.for_model(case.model_type, **copy.deepcopy(document))
    print(f"{name}, seed {seed}: {document}")
    torch.manual_seed(seed)
    reference = class_of(config)._from_config(config, attn_implementation="eager").eval()
    reference.config._experts_implementation = "eager"  # grouped products do not support float64
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
                parameter.mul_(case.query_norm if "q_norm" in name or "q_a_" in name else 1.0)
            elif parameter.ndim == 1:
                parameter.normal_(std=0.5)
            elif "embed" not in name:
                parameter.normal_(std=0.7 * parameter.shape[-1] ** -0.5)
        for buffer in reference.state_dict().values():
            if buffer.shape == (1,):  # a factor of a layer
                buffer.uniform_(0.5, 1.5)
        for name, buffer in reference.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(std=0.2)
    return reference


def family_of(name: str) -> Any:
    """Return the package of the family that reads a case's type, or a `model_type`."""
    model_type = name.partition(",")[0]
    return next(f for f in families_with("hf") if model_type in f.FORMATS["hf"].model_types)


def to_ours(family: Any, reference: Any) -> tuple[BaseModel, dict[str, Tensor]]:
    """Return our model of transformers' configuration and weights, and those weights as in its
    files."""
    format = family.FORMATS["hf"]
    config = format.from_external(reference.config.to_dict())
    weights = reference.state_dict()
    adapter = adapter_for(format, config, weights)
    theirs = {name: tensor for name, tensor in weights.items() if name not in adapter.tied}
    model: BaseModel = config.build()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    ours: dict[str, Tensor] = {}
    for step in adapter.steps:
        tensors = step.transform.to_internal(
            [theirs[n] for n in step.external], [shapes[n] for n in step.internal]
        )
        ours |= dict(zip(step.internal, tensors, strict=True))
    assert {name for step in adapter.steps for name in step.external} == set(theirs)
    model.load_state_dict(ours)
    return model.eval(), theirs


def to_external(family: Any, model: BaseModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of our model, weights or gradients, under the names and in the layout of
    transformers' class. Skips tensors that are not given, such as a buffer's gradient."""
    converted: dict[str, Tensor] = {}
    format = family.FORMATS["hf"]
    for step in (format.other_adapter(model.config) or format.adapter(model.config)).steps:
        if tensors.keys().isdisjoint(step.internal):
            continue
        outputs = step.transform.to_external([tensors[name] for name in step.internal])
        converted |= dict(zip(step.external, outputs, strict=True))
    return converted


def random_tokens(vocab_size: int, length: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, (2, length), some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(vocab_size, (2, length), generator=generator) for _ in range(2))
    labels[:, : math.isqrt(length)] = IGNORE_INDEX
    return tokens, labels


def relative_error(ours: Tensor, theirs: Tensor, least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest element, or to `least` if that is
    larger."""
    return (ours - theirs).abs().max().item() / max(theirs.abs().max().item(), least)


def difference_with(mistake: Callable[[Any], None], reference: Any) -> float:
    """Return the largest difference of logits between transformers' model and ours, changed by
    `mistake`."""
    model, _ = to_ours(family_of(reference.config.model_type), reference)
    mistake(model)
    tokens, _ = random_tokens(97, 50)
    with torch.no_grad():
        return (model(tokens) - reference(tokens).logits).abs().max().item()


def all_cases(seeds: int) -> Iterator[Any]:
    """Yield names of cases with seeds; all but the first two seeds are slow tests."""
    for name in CASES:
        for seed in range(seeds):
            yield pytest.param(name, seed, marks=[pytest.mark.slow] if seed > 1 else [])

"""DeepSeek-V2, V3 and R1, and Kimi K2 in their published sizes, and a small one that trains on a laptop."""

from dataclasses import replace
from typing import Any

from torchtitan.models.common.moe.layer import SigmoidMoEConfig
from torchtitan.models.common.moe.rows import MOE_SHARDING
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.deepseek_v3.model import FORMAT, DeepSeekModel
from torchtitan.models.families import SMALL, Family


def _experts(n_experts: int, top_k: int, width: int, n_layers: int, n_dense: int, **options: Any) -> dict[str, Any]:
    kinds: Any = ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense)
    moe = SigmoidMoEConfig(n_experts=n_experts, top_k=top_k, ffn_dim=width, layer_types=kinds, **options)
    return {"n_layers": n_layers, "moe": moe}


def _heads(n_heads: int, *, mscale: float, theta: float = 1e4, factor: float = 40.0, fast: float = 32.0) -> Any:
    rope = RoPEConfig(theta=theta, rotated_fraction=1 / 3, scaling="yarn", scaling_factor=factor, mscale_all_dim=mscale)
    rope.high_freq_factor, rope.original_max_seq_len, rope.attention_factor = fast, 4096, 1.0
    widths = {"head_dim": 192, "v_head_dim": 128, "kv_lora_rank": 512, "norm_eps": 1e-6}
    return {"n_heads": n_heads, "n_kv_heads": n_heads, "rope": rope, **widths}


_V2: Any = {"vocab_size": 102_400, "max_seq_len": 163_840}
_V2_MOE: Any = {"n_shared_experts": 2, "norm_topk_prob": False, "scoring_func": "softmax"}
_V3: Any = {"dim": 7168, "ffn_dim": 18432, "q_lora_rank": 1536}
_SMALL: Any = {"head_dim": 48, "v_head_dim": 32, "q_lora_rank": 96, "kv_lora_rank": 64, "n_kv_heads": 8}

FLAVORS = {
    "debugmodel": DeepSeekModel.Config(
        **{**SMALL, **_SMALL, **_experts(32, 4, 128, 4, 1, n_group=4, topk_group=2, routed_scaling_factor=2.0)},
        rope=RoPEConfig(theta=10_000.0, rotated_fraction=1 / 3),
    ),
    "V2-Lite-16B": DeepSeekModel.Config(
        **{**_V2, **_heads(16, mscale=0.707), **_experts(64, 6, 1408, 27, 1, **_V2_MOE)}, dim=2048, ffn_dim=10944
    ),
    "V2-236B": DeepSeekModel.Config(
        **{**_V2, **_heads(128, mscale=0.707), "dim": 5120, "ffn_dim": 12288, "q_lora_rank": 1536},
        **_experts(160, 6, 1536, 60, 1, **_V2_MOE, n_group=8, topk_group=3, routed_scaling_factor=16.0),
    ),
    "V3-671B": DeepSeekModel.Config(
        **{**_V3, **_heads(128, mscale=1.0), "vocab_size": 129_280, "max_seq_len": 163_840},
        **_experts(256, 8, 2048, 61, 3, n_group=8, topk_group=4, routed_scaling_factor=2.5),
    ),
    "Kimi-K2-1T": DeepSeekModel.Config(
        **{**_V3, **_heads(64, mscale=1.0, theta=5e4, factor=32.0, fast=1.0)},
        **_experts(384, 8, 2048, 61, 1, routed_scaling_factor=2.827),
        **{"vocab_size": 163_840, "max_seq_len": 131_072},
    ),
}

_OTHERS = {name: kind for name, kind in MOE_SHARDING.tensor.items() if not f"{name}.".startswith("layers.*.attention.")}
_LATENT: Any = {
    **dict.fromkeys(("q_latent", "wkv_a", "kv_norm"), "local tokens"),
    **{"wq": "parts to columns", "latents": "parts to shared", "attend.wkv_b": "shared to columns", "wo": "rows"},
}
SHARDING = replace(
    MOE_SHARDING, tensor={**_OTHERS, **{f"layers.*.attention.{name}": kind for name, kind in _LATENT.items()}}
)
"""Ranks of tensor parallelism compute the latents of their own part of the tokens, and gather them for their heads."""

FORMATS = {"hf": FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

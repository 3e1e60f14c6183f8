"""The models of Gemma 4 in their published sizes, without vision and sound, and small ones that
train on a laptop."""

from functools import partial
from typing import Any

from torchtitan.models.common.layer_types import one_full_of
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, of_sizes
from torchtitan.models.gemma4.model import FORMAT, GGUF, Gemma4Model, Gemma4MoEModel

_DEBUG: dict[str, Any] = {
    **SMALL,
    "norm_eps": 1e-6,
    "tie_embeddings": True,
    "attention_k_eq_v": True,
    "sliding_window": 64,
    "global_head_dim": 64,
    "num_global_key_value_heads": 2,
    "final_logit_softcapping": 30.0,
    "rope": RoPEConfig(theta=1e6, scaling="proportional", rotated_fraction=0.25),
    "layer_types": one_full_of(2),
}

_small = partial(of_sizes, FORMAT, "gemma4_text", final_logit_softcapping=30.0, max_seq_len=131_072)
_large = partial(
    _small,
    hidden_size_per_layer_input=0,
    attention_k_eq_v=True,
    sliding_window=1024,
    max_seq_len=262_144,
)
_26B = {
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}

FLAVORS = {
    "debugmodel": Gemma4Model.Config(**_DEBUG),
    "small-debugmodel": Gemma4Model.Config(
        **_DEBUG,
        hidden_size_per_layer_input=32,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    ),
    "moe-debugmodel": Gemma4MoEModel.Config(
        **_DEBUG, moe=MoEConfig(n_experts=16, top_k=2, ffn_dim=96)
    ),
    "E2B": _small(
        1536,
        6144,
        35,
        8,
        262_144,
        num_key_value_heads=1,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
        layer_types=one_full_of(5) * 7,
    ),
    "E4B": _small(2560, 10240, 42, 8, 262_144, num_key_value_heads=2, num_kv_shared_layers=18),
    "12B": _large(
        3840, 15360, 48, 16, 262_144, num_key_value_heads=8, num_global_key_value_heads=1
    ),
    "26B-A4B": _large(
        2816, 2112, 30, 16, 262_144, num_key_value_heads=8, num_global_key_value_heads=2, **_26B
    ),
    "31B": _large(
        5376, 21504, 60, 32, 262_144, num_key_value_heads=16, num_global_key_value_heads=4
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

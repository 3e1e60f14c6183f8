"""The models of Gemma 4 in their published sizes, without vision and sound, and small ones that train on a laptop."""

from typing import Any

from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.moe.rows import MOE_SHARDING
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.gemma4.model import FORMAT, PATTERN, Gemma4Model, Gemma4MoEModel, Gemma4SmallModel

_ROPE = RoPEConfig(theta=1e6, scaling="proportional", rotated_fraction=0.25)
_ALL: dict[str, Any] = {"rope": _ROPE, "norm_eps": 1e-6, "tie_embeddings": True, "final_logit_softcapping": 30.0}
_DEBUG = {**_ALL, **SMALL, "sliding_window": 64, "global_head_dim": 64, "num_global_key_value_heads": 2}
_DEBUG |= {"attention_k_eq_v": True, "layer_types": ["sliding_attention", "full_attention"]}
_OWN = {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
_BASE = {**_ALL, "head_dim": 256, "vocab_size": 262_144, "layer_types": PATTERN}
_LARGE = {**_BASE, "sliding_window": 1024, "max_seq_len": 262_144, "attention_k_eq_v": True}
_12B = {"dim": 3840, "n_layers": 48, "n_heads": 16, "n_kv_heads": 8, "ffn_dim": 15360, "num_global_key_value_heads": 1}
_26B = {"dim": 2816, "n_layers": 30, "n_heads": 16, "n_kv_heads": 8, "ffn_dim": 2112, "num_global_key_value_heads": 2}
_31B = {"dim": 5376, "n_layers": 60, "n_heads": 32, "n_kv_heads": 16, "ffn_dim": 21504, "num_global_key_value_heads": 4}
_E = {**_BASE, "sliding_window": 512, "max_seq_len": 131_072, "n_heads": 8, "hidden_size_per_layer_input": 256}
_E2B = {"dim": 1536, "n_layers": 35, "n_kv_heads": 1, "ffn_dim": 6144, "num_global_key_value_heads": 1}
_E2B |= {"num_kv_shared_layers": 20, "use_double_wide_mlp": True, "layer_types": PATTERN[1:]}
_E4B = {"dim": 2560, "n_layers": 42, "n_kv_heads": 2, "ffn_dim": 10240, "num_global_key_value_heads": 2}

FLAVORS = {
    "debugmodel": Gemma4Model.Config(**_DEBUG),
    "small-debugmodel": Gemma4SmallModel.Config(**_DEBUG, **_OWN),
    "moe-debugmodel": Gemma4MoEModel.Config(**{**_DEBUG, "ffn_dim": 192}, moe=MoEConfig(n_experts=16, top_k=2, ffn_dim=96)),
    "E2B": Gemma4SmallModel.Config(**{**_E, **_E2B}),
    "E4B": Gemma4SmallModel.Config(**_E, **_E4B, num_kv_shared_layers=18),
    "12B": Gemma4Model.Config(**_LARGE, **_12B),
    "26B-A4B": Gemma4MoEModel.Config(**_LARGE, **_26B, moe=MoEConfig(n_experts=128, top_k=8, ffn_dim=704)),
    "31B": Gemma4Model.Config(**_LARGE, **_31B),
}

FORMATS = {"hf": FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=MOE_SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

"""The dense models of Gemma 4 without vision in their published sizes, and a small one that trains on a laptop."""

from typing import Any

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.gemma4.model import FORMAT, PATTERN, Gemma4Model

_ROPE = RoPEConfig(theta=1e6, scaling="proportional", rotated_fraction=0.25)
_ALL: dict[str, Any] = {"rope": _ROPE, "norm_eps": 1e-6, "tie_embeddings": True, "attention_k_eq_v": True}
_ALL |= {"final_logit_softcapping": 30.0}
_DEBUG = {**_ALL, **SMALL, "sliding_window": 64, "global_head_dim": 64, "num_global_key_value_heads": 2}
_BASE = {**_ALL, "head_dim": 256, "sliding_window": 1024, "vocab_size": 262_144, "max_seq_len": 262_144}
_12B = {"dim": 3840, "n_layers": 48, "n_heads": 16, "n_kv_heads": 8, "ffn_dim": 15360, "num_global_key_value_heads": 1}
_31B = {"dim": 5376, "n_layers": 60, "n_heads": 32, "n_kv_heads": 16, "ffn_dim": 21504, "num_global_key_value_heads": 4}

FLAVORS = {
    "debugmodel": Gemma4Model.Config(**_DEBUG, layer_types=["sliding_attention", "full_attention"]),
    "12B": Gemma4Model.Config(**{**_BASE, **_12B}, layer_types=PATTERN),
    "31B": Gemma4Model.Config(**{**_BASE, **_31B}, layer_types=PATTERN),
}

FORMATS = {"hf": FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

"""Llama 4 in its published sizes, without vision, and a small one that trains on a laptop."""

from typing import Any

from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.moe.rows import MOE_SHARDING
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.llama4.model import FORMAT, Llama4Model

_PUBLISHED = {"dim": 5120, "n_layers": 48, "n_heads": 40, "n_kv_heads": 8, "head_dim": 128, "ffn_dim": 16384}
_PUBLISHED |= {"vocab_size": 202_048, "max_seq_len": 262_144, "sliding_window": 8192}
_DEBUG: Any = {**SMALL, "sliding_window": 64, "floor_scale": 64, "rope": RoPEConfig(theta=10_000.0)}
_DENSE_SPARSE: Any = {"top_k": 1, "layer_types": ["dense", "sparse"]}

FLAVORS = {
    "debugmodel": Llama4Model.Config(**_DEBUG, moe=MoEConfig(n_experts=8, ffn_dim=192, **_DENSE_SPARSE)),
    "17B-16E": Llama4Model.Config(**_PUBLISHED, moe=MoEConfig(n_experts=16, top_k=1, ffn_dim=8192), rope=RoPEConfig()),
    "17B-128E": Llama4Model.Config(
        **_PUBLISHED, use_qk_norm=False, moe=MoEConfig(n_experts=128, ffn_dim=8192, **_DENSE_SPARSE), rope=RoPEConfig()
    ),
}

FORMATS = {"hf": FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=MOE_SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

"""Qwen3-Next's model in its published size, and a small one that trains on a laptop."""

from torchtitan.models.common.mixers import hybrid_sharding
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, of_sizes
from torchtitan.models.qwen3_next.model import FORMAT, GGUF, Qwen3NextModel

FLAVORS = {
    "debugmodel": Qwen3NextModel.Config(
        **SMALL,
        norm_eps=1e-6,
        rope=RoPEConfig(theta=1e4, rotated_fraction=0.25),
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        moe=MoEConfig(n_experts=32, top_k=4, ffn_dim=96, shared_ffn_dim=128),
    ),
    "80B-A3B": of_sizes(
        FORMAT,
        "qwen3_next",
        *(2048, 5120, 48, 16, 151_936),
        max_seq_len=262_144,
        rope_theta=1e7,
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
SHARDING = hybrid_sharding(Qwen3NextModel.Config.mixers)
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

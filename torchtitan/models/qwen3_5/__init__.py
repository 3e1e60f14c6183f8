"""Qwen3.5's models in published sizes, without vision, and small ones that train on a laptop."""

from functools import partial
from typing import Any

from torchtitan.models.common.mixers import hybrid_sharding
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.qwen3_5.model import FORMAT, GGUF, Qwen35Model, Qwen35MoEModel

_ROPE = RoPEConfig(theta=10_000_000.0, rotated_fraction=0.25)
_published = partial(
    Qwen35Model.Config, vocab_size=248_320, max_seq_len=262_144, norm_eps=1e-6, rope=_ROPE
)
_small = partial(
    _published, n_layers=24, n_heads=8, n_kv_heads=2, linear_num_value_heads=16, tie_embeddings=True
)
_medium = partial(_published, n_layers=32, n_heads=16, n_kv_heads=4)
_DEBUG: dict[str, Any] = {
    **SMALL,
    "norm_eps": 1e-6,
    "rope": RoPEConfig(theta=10_000.0, rotated_fraction=0.25),
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}

FLAVORS = {
    "debugmodel": Qwen35Model.Config(**_DEBUG),
    "moe-debugmodel": Qwen35MoEModel.Config(
        **{**_DEBUG, "ffn_dim": 96}, moe=MoEConfig(n_experts=32, top_k=4, shared_ffn_dim=96)
    ),
    "0.8B": _small(dim=1024, head_dim=256, ffn_dim=3584),
    "2B": _small(dim=2048, ffn_dim=6144),
    "4B": _medium(dim=2560, head_dim=256, ffn_dim=9216, tie_embeddings=True),
    "9B": _medium(dim=4096, ffn_dim=12288),
    "27B": _published(
        dim=5120,
        n_layers=64,
        n_heads=24,
        n_kv_heads=4,
        head_dim=256,
        ffn_dim=17408,
        linear_num_value_heads=48,
    ),
    "35B-A3B": Qwen35MoEModel.Config(
        dim=2048,
        n_layers=40,
        n_heads=16,
        n_kv_heads=2,
        head_dim=256,
        ffn_dim=512,
        vocab_size=248_320,
        max_seq_len=262_144,
        norm_eps=1e-6,
        rope=_ROPE,
        moe=MoEConfig(n_experts=256, top_k=8, shared_ffn_dim=512),
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
SHARDING = hybrid_sharding(Qwen35Model.Config.mixers)
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

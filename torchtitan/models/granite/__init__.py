"""Granite 3.3 and 4.0 in published sizes, and small ones that train on a laptop."""

from typing import Any

from torchtitan.models.common.config_reader import shortest_period
from torchtitan.models.common.decoder import DENSE_SHARDING, Decoder
from torchtitan.models.common.mamba import MambaConfig
from torchtitan.models.common.mixers import HybridDecoder, hybrid_sharding
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.granite.model import (
    FORMAT,
    GGUF,
    Granite4Model,
    Granite4MoEModel,
    GraniteModel,
)
from torchtitan.protocols import ShardingPlan

_FACTORS: dict[str, Any] = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
_COMMON = {
    **_FACTORS,
    "n_layers": 40,
    "n_kv_heads": 8,
    "max_seq_len": 131_072,
    "tie_embeddings": True,
    "rope": RoPEConfig(theta=10_000_000.0),
}
_DEBUG = {**SMALL, **_FACTORS, "rope": RoPEConfig(theta=10_000.0)}
_3 = {**_COMMON, "n_heads": 32, "vocab_size": 49_159}
_4 = {**_COMMON, "vocab_size": 100_352}
_ATTENTION = (5, 15, 25, 35)
_HYBRID = {
    **_4,
    "position_embedding_type": "nope",
    "layer_types": shortest_period(
        ["full_attention" if index in _ATTENTION else "linear_attention" for index in range(40)]
    ),
    "rope": RoPEConfig(theta=10_000.0),
}
_DEBUG_4 = {
    **_DEBUG,
    "attention_multiplier": 1 / 32,
    "logits_scaling": 4.0,
    "mamba": MambaConfig(n_heads=16, head_dim=32, n_groups=4, state_dim=32),
}
_DEBUG_MOE = MoEConfig(n_experts=16, top_k=4, shared_ffn_dim=192)

FLAVORS = {
    "debugmodel": GraniteModel.Config(**_DEBUG, attention_multiplier=1 / 32, logits_scaling=4.0),
    "3.3-2B": GraniteModel.Config(
        **_3, dim=2048, ffn_dim=8192, attention_multiplier=1 / 64, logits_scaling=8.0
    ),
    "3.3-8B": GraniteModel.Config(
        **_3, dim=4096, ffn_dim=12800, attention_multiplier=1 / 128, logits_scaling=16.0
    ),
    "hybrid-debugmodel": Granite4Model.Config(**_DEBUG_4),
    "moe-debugmodel": Granite4MoEModel.Config(**{**_DEBUG_4, "ffn_dim": 96}, moe=_DEBUG_MOE),
    "4.0-micro": Granite4Model.Config(
        **_4,
        dim=2560,
        n_heads=40,
        ffn_dim=8192,
        attention_multiplier=1 / 64,
        logits_scaling=10.0,
        layer_types=["full_attention"],
    ),
    "4.0-H-micro": Granite4Model.Config(
        **_HYBRID,
        dim=2048,
        n_heads=32,
        ffn_dim=8192,
        attention_multiplier=1 / 64,
        logits_scaling=8.0,
        mamba=MambaConfig(n_heads=64),
    ),
    "4.0-H-tiny": Granite4MoEModel.Config(
        **{**_HYBRID, "n_kv_heads": 4},
        dim=1536,
        n_heads=12,
        ffn_dim=512,
        attention_multiplier=1 / 128,
        logits_scaling=6.0,
        mamba=MambaConfig(n_heads=48),
        moe=MoEConfig(n_experts=64, top_k=6, shared_ffn_dim=1024),
    ),
    "4.0-H-small": Granite4MoEModel.Config(
        **_HYBRID,
        dim=4096,
        n_heads=32,
        ffn_dim=768,
        attention_multiplier=1 / 128,
        logits_scaling=16.0,
        mamba=MambaConfig(n_heads=128),
        moe=MoEConfig(n_experts=72, top_k=10, shared_ffn_dim=1536),
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}


def _sharding(config: Decoder.Config) -> ShardingPlan:
    if isinstance(config, HybridDecoder.Config):
        return hybrid_sharding(config.mixers)
    return DENSE_SHARDING


FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=_sharding)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

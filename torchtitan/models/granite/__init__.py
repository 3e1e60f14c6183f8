"""Granite 3.3 and the dense Granite 4.0 in published sizes, and a small one that trains on a laptop."""

from typing import Any

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import Family
from torchtitan.models.granite.model import FORMAT, Granite4Model, GraniteModel

_COMMON: dict[str, Any] = {
    "n_layers": 40,
    "n_kv_heads": 8,
    "max_seq_len": 131_072,
    "tie_embeddings": True,
    "rope": RoPEConfig(theta=10_000_000.0),
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
}

FLAVORS = {
    "debugmodel": GraniteModel.Config(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=768,
        max_seq_len=2048,
        rope=RoPEConfig(theta=10_000.0),
        embedding_multiplier=12.0,
        attention_multiplier=1 / 32,
        residual_multiplier=0.22,
        logits_scaling=4.0,
    ),
    "3.3-2B": GraniteModel.Config(
        dim=2048,
        n_heads=32,
        ffn_dim=8192,
        vocab_size=49_159,
        attention_multiplier=1 / 64,
        logits_scaling=8.0,
        **_COMMON,
    ),
    "3.3-8B": GraniteModel.Config(
        dim=4096,
        n_heads=32,
        ffn_dim=12800,
        vocab_size=49_159,
        attention_multiplier=1 / 128,
        logits_scaling=16.0,
        **_COMMON,
    ),
    "4.0-micro": Granite4Model.Config(
        dim=2560,
        n_heads=40,
        ffn_dim=8192,
        vocab_size=100_352,
        attention_multiplier=1 / 64,
        logits_scaling=10.0,
        **_COMMON,
    ),
}

FORMATS = {"hf": FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

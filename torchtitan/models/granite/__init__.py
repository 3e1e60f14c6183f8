"""Granite 3.3 and the dense Granite 4.0 in published sizes, and a small one that trains on a
laptop."""

from typing import Any

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.granite.model import FORMAT, GGUF, Granite4Model, GraniteModel

_FACTORS: dict[str, Any] = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
_COMMON = {
    **_FACTORS,
    "n_layers": 40,
    "n_kv_heads": 8,
    "max_seq_len": 131_072,
    "tie_embeddings": True,
}
_COMMON |= {"rope": RoPEConfig(theta=10_000_000.0)}
_DEBUG = {**SMALL, **_FACTORS, "rope": RoPEConfig(theta=10_000.0)}
_3 = {**_COMMON, "n_heads": 32, "vocab_size": 49_159}
_4 = {**_COMMON, "n_heads": 40, "vocab_size": 100_352}

FLAVORS = {
    "debugmodel": GraniteModel.Config(**_DEBUG, attention_multiplier=1 / 32, logits_scaling=4.0),
    "3.3-2B": GraniteModel.Config(
        **_3, dim=2048, ffn_dim=8192, attention_multiplier=1 / 64, logits_scaling=8.0
    ),
    "3.3-8B": GraniteModel.Config(
        **_3, dim=4096, ffn_dim=12800, attention_multiplier=1 / 128, logits_scaling=16.0
    ),
    "4.0-micro": Granite4Model.Config(
        **_4, dim=2560, ffn_dim=8192, attention_multiplier=1 / 64, logits_scaling=10.0
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

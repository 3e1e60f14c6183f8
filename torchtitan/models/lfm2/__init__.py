"""LFM2's models in published sizes, and small ones that train on a laptop."""

from typing import Any

from torchtitan.models.common.config_reader import shortest_period
from torchtitan.models.common.mixers import hybrid_sharding
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.lfm2.model import FORMAT, GGUF, LayerType, Lfm2Model, Lfm2MoEModel


def _types(*attention: int, n_layers: int) -> list[LayerType]:
    return shortest_period(
        ["full_attention" if index in attention else "conv" for index in range(n_layers)]
    )


_COMMON: dict[str, Any] = {
    "n_kv_heads": 8,
    "max_seq_len": 128_000,
    "vocab_size": 65_536,
    "tie_embeddings": True,
    "rope": RoPEConfig(theta=1_000_000.0),
}
_SMALL = {**_COMMON, "n_layers": 16, "layer_types": _types(2, 5, 8, 10, 12, 14, n_layers=16)}
_DEBUG: dict[str, Any] = {**SMALL, "tie_embeddings": True, "rope": RoPEConfig(theta=10_000.0)}
_DEBUG_MOE = MoEConfig(
    n_experts=16,
    top_k=4,
    ffn_dim=128,
    scoring_func="sigmoid",
    selection_bias=True,
    layer_types=["dense", "sparse", "sparse", "sparse"],
)
_8B_MOE = MoEConfig(
    n_experts=32,
    top_k=4,
    ffn_dim=1792,
    scoring_func="sigmoid",
    selection_bias=True,
    layer_types=["dense" if index < 2 else "sparse" for index in range(24)],
)

FLAVORS = {
    "debugmodel": Lfm2Model.Config(**_DEBUG),
    "moe-debugmodel": Lfm2MoEModel.Config(**_DEBUG, moe=_DEBUG_MOE),
    "350M": Lfm2Model.Config(**_SMALL, dim=1024, n_heads=16, ffn_dim=4608),
    "700M": Lfm2Model.Config(**_SMALL, dim=1536, n_heads=24, ffn_dim=6912),
    "1.2B": Lfm2Model.Config(**_SMALL, dim=2048, n_heads=32, ffn_dim=8192),
    "2.6B": Lfm2Model.Config(
        **_COMMON,
        dim=2048,
        n_layers=30,
        n_heads=32,
        ffn_dim=10752,
        layer_types=_types(2, 5, 9, 13, 17, 21, 25, 28, n_layers=30),
    ),
    "8B-A1B": Lfm2MoEModel.Config(
        **_COMMON,
        dim=2048,
        n_layers=24,
        n_heads=32,
        ffn_dim=7168,
        layer_types=_types(2, 6, 10, 14, 18, 21, n_layers=24),
        moe=_8B_MOE,
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
SHARDING = hybrid_sharding(Lfm2Model.Config.mixers)
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

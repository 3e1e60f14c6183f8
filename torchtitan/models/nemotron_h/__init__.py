"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano in published sizes, and small ones that train on
a laptop."""

from functools import partial
from typing import Any

from torchtitan.models.common.config_reader import shortest_period
from torchtitan.models.common.mamba import MambaConfig
from torchtitan.models.common.mixers import hybrid_sharding
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.nemotron_h.model import (
    FORMAT,
    GGUF,
    PATTERN,
    NemotronHModel,
    NemotronHMoEModel,
)


def _layers(pattern: str) -> Any:
    types = shortest_period([PATTERN[letter] for letter in pattern])
    return {"n_layers": len(pattern), "layer_types": types}


_COMMON: Any = {"vocab_size": 131_072, "n_kv_heads": 8}
_mamba = partial(MambaConfig, n_groups=8, least_step=0.001)
_DEBUG: dict[str, Any] = {
    **SMALL,
    "mamba": MambaConfig(n_heads=16, head_dim=32, n_groups=4, state_dim=32),
}
_experts = partial(
    MoEConfig, scoring_func="sigmoid", selection_bias=True, routed_scaling_factor=2.5
)
_DEBUG_MOE = _experts(n_experts=16, top_k=4, ffn_dim=128, shared_ffn_dim=256)
_30B_MOE = _experts(n_experts=128, top_k=6, ffn_dim=1856, shared_ffn_dim=3712)

FLAVORS = {
    "debugmodel": NemotronHModel.Config(**{**_DEBUG, **_layers("M-M-*-M-")}),
    "moe-debugmodel": NemotronHMoEModel.Config(**{**_DEBUG, **_layers("MEM*EM-E")}, moe=_DEBUG_MOE),
    "8B": NemotronHModel.Config(
        **_COMMON,
        **_layers("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
        dim=4096,
        n_heads=32,
        ffn_dim=21504,
        max_seq_len=8192,
        mamba=_mamba(n_heads=128),
    ),
    "Nano-9B-v2": NemotronHModel.Config(
        **_COMMON,
        **_layers("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"),
        dim=4480,
        head_dim=128,
        n_heads=40,
        ffn_dim=15680,
        max_seq_len=131_072,
        mamba=_mamba(n_heads=128, head_dim=80),
    ),
    "Nano-12B-v2": NemotronHModel.Config(
        **_COMMON,
        **_layers("M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-"),
        dim=5120,
        n_heads=40,
        ffn_dim=20480,
        max_seq_len=131_072,
        mamba=_mamba(n_heads=128, head_dim=80),
    ),
    "3-Nano-30B-A3B": NemotronHMoEModel.Config(
        **{**_COMMON, "n_kv_heads": 2},
        **_layers("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
        dim=2688,
        head_dim=128,
        n_heads=32,
        ffn_dim=1856,
        max_seq_len=262_144,
        mamba=_mamba(n_heads=64),
        moe=_30B_MOE,
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
SHARDING = hybrid_sharding(NemotronHMoEModel.Config.mixers)
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

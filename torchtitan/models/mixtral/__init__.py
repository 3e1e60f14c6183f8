"""Mixtral in its published sizes, and a small one that trains on a laptop."""

from typing import Any

from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.moe.rows import MOE_SHARDING
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.mixtral.model import FORMAT, MixtralModel


def _published(**sizes: Any) -> MixtralModel.Config:
    experts, rope = MoEConfig(n_experts=8, top_k=2), RoPEConfig(theta=1_000_000.0)
    return MixtralModel.Config(n_kv_heads=8, moe=experts, rope=rope, **sizes)


_8x7B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim": 14336, "max_seq_len": 32_768}
_8x22B = {"dim": 6144, "n_layers": 56, "n_heads": 48, "ffn_dim": 16384, "max_seq_len": 65_536}

FLAVORS = {
    "debugmodel": MixtralModel.Config(
        **{**SMALL, "ffn_dim": 384}, moe=MoEConfig(n_experts=8, top_k=2), rope=RoPEConfig(theta=10_000.0)
    ),
    "8x7B": _published(**_8x7B, vocab_size=32_000),
    "8x22B": _published(**_8x22B, vocab_size=32_000),
    "8x22B-v0.3": _published(**_8x22B, vocab_size=32_768),
}

FORMATS = {"hf": FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=MOE_SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

"""GLM-4.5, its Air, and GLM-4.6 in their published sizes, and a small one that trains on a laptop."""

from typing import Any

from torchtitan.models.common.moe.layer import SigmoidMoEConfig
from torchtitan.models.common.moe.rows import MOE_SHARDING
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.glm4_moe.model import FORMAT, GLM4MoeModel


def _published(
    *, n_experts: int, width: int, n_layers: int, n_dense: int, scale: float, max_seq_len: int = 131_072, **sizes: Any
) -> GLM4MoeModel.Config:
    kinds: Any = ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense)
    return GLM4MoeModel.Config(
        n_layers=n_layers,
        n_heads=96,
        n_kv_heads=8,
        head_dim=128,
        vocab_size=151_552,
        max_seq_len=max_seq_len,
        attention_bias=True,
        rope=RoPEConfig(theta=1_000_000.0, rotated_fraction=0.5),
        moe=SigmoidMoEConfig(
            n_experts=n_experts, top_k=8, ffn_dim=width, layer_types=kinds, routed_scaling_factor=scale
        ),
        **sizes,
    )


_355B: dict[str, Any] = {
    "n_experts": 160,
    "width": 1536,
    "n_layers": 92,
    "n_dense": 3,
    "scale": 2.5,
    "dim": 5120,
    "ffn_dim": 12288,
}
_106B: dict[str, Any] = {
    "n_experts": 128,
    "width": 1408,
    "n_layers": 46,
    "n_dense": 1,
    "scale": 1.0,
    "dim": 4096,
    "ffn_dim": 10944,
}

FLAVORS = {
    "debugmodel": GLM4MoeModel.Config(
        **SMALL,
        use_qk_norm=True,
        rope=RoPEConfig(theta=10_000.0, rotated_fraction=0.5),
        moe=SigmoidMoEConfig(
            n_experts=32,
            top_k=4,
            ffn_dim=96,
            layer_types=["dense", "sparse", "sparse", "sparse"],
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.0,
        ),
    ),
    "4.5-Air-106B": _published(**_106B),
    "4.5-355B": _published(**_355B, use_qk_norm=True),
    "4.6-355B": _published(**_355B, use_qk_norm=True, max_seq_len=202_752),
}

FORMATS = {"hf": FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=MOE_SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

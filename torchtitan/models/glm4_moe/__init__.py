"""GLM-4.5, its Air, and GLM-4.6 in their published sizes, and a small one that trains on a laptop."""

from typing import Any

from torchtitan.models.common.moe.layer import SigmoidMoEConfig
from torchtitan.models.common.moe.rows import MOE_SHARDING
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.glm4_moe.model import FORMAT, GLM4MoeModel


def _experts(n_experts: int, width: int, scale: float, n_layers: int, n_dense: int) -> dict[str, Any]:
    kinds: Any = ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense)
    sizes: Any = {"n_experts": n_experts, "top_k": 8, "ffn_dim": width, "routed_scaling_factor": scale}
    return {"n_layers": n_layers, "moe": SigmoidMoEConfig(**sizes, layer_types=kinds)}


_ALL: dict[str, Any] = {"n_heads": 96, "n_kv_heads": 8, "head_dim": 128, "vocab_size": 151_552, "attention_bias": True}
_ALL |= {"rope": RoPEConfig(theta=1_000_000.0, rotated_fraction=0.5)}
_106B = {**_ALL, "dim": 4096, "ffn_dim": 10944, **_experts(128, 1408, 1.0, 46, 1)}
_355B = {**_ALL, "dim": 5120, "ffn_dim": 12288, "use_qk_norm": True, **_experts(160, 1536, 2.5, 92, 3)}
_SMALL: Any = {"n_experts": 32, "top_k": 4, "ffn_dim": 128, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0}

FLAVORS = {
    "debugmodel": GLM4MoeModel.Config(
        **SMALL,
        use_qk_norm=True,
        rope=RoPEConfig(theta=10_000.0, rotated_fraction=0.5),
        moe=SigmoidMoEConfig(**_SMALL, layer_types=["dense", "sparse", "sparse", "sparse"]),
    ),
    "4.5-Air-106B": GLM4MoeModel.Config(**_106B, max_seq_len=131_072),
    "4.5-355B": GLM4MoeModel.Config(**_355B, max_seq_len=131_072),
    "4.6-355B": GLM4MoeModel.Config(**_355B, max_seq_len=202_752),
}

FORMATS = {"hf": FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=MOE_SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

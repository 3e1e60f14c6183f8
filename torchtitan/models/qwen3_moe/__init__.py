"""The models of Qwen3, Qwen2 and Qwen1.5 with experts, in their published sizes, and small ones for a laptop."""

from typing import Any

from torchtitan.models.common.moe.layer import QwenMoEConfig
from torchtitan.models.common.moe.rows import MOE_SHARDING
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.qwen3_moe.model import FORMAT, Qwen2MoeModel, Qwen3MoeModel

_ALL: dict[str, Any] = {"vocab_size": 151_936, "norm_eps": 1e-6}


def _experts(n_experts: int, top_k: int, width: int, shared: int | None = None) -> QwenMoEConfig:
    sizes: Any = {"n_experts": n_experts, "top_k": top_k, "ffn_dim": width, "shared_ffn_dim": shared}
    return QwenMoEConfig(**sizes, norm_topk_prob=shared is None)


def _3(n_experts: int, width: int, *, theta: float = 1e6, max_seq_len: int = 40_960, **sizes: Any) -> Any:
    moe, rope = _experts(n_experts, 8, width), RoPEConfig(theta=theta)
    return Qwen3MoeModel.Config(**_ALL, head_dim=128, max_seq_len=max_seq_len, moe=moe, rope=rope, **sizes)


def _2(n_experts: int, top_k: int, width: int, shared: int, **sizes: Any) -> Qwen2MoeModel.Config:
    moe, rope = _experts(n_experts, top_k, width, shared), RoPEConfig(theta=1e6)
    return Qwen2MoeModel.Config(**_ALL, moe=moe, rope=rope, **sizes)


_30B = {"dim": 2048, "n_layers": 48, "n_heads": 32, "n_kv_heads": 4}
_235B = {"dim": 4096, "n_layers": 94, "n_heads": 64, "n_kv_heads": 4}
_480B = {"dim": 6144, "n_layers": 62, "n_heads": 96, "n_kv_heads": 8}
_14B = {"dim": 2048, "n_layers": 24, "n_heads": 16, "n_kv_heads": 16}
_57B = {"dim": 3584, "n_layers": 28, "n_heads": 28, "n_kv_heads": 4}
_SMALL: dict[str, Any] = {**SMALL, "norm_eps": 1e-6, "rope": RoPEConfig(theta=10_000.0)}

FLAVORS = {
    "debugmodel": Qwen3MoeModel.Config(**_SMALL, head_dim=64, moe=_experts(32, 4, 96)),
    "2-debugmodel": Qwen2MoeModel.Config(**_SMALL, moe=_experts(16, 2, 96, 192)),
    "30B-A3B": _3(128, 768, **_30B, ffn_dim=6144),
    "235B-A22B": _3(128, 1536, **_235B, ffn_dim=12288),
    "Coder-480B-A35B": _3(160, 2560, **_480B, ffn_dim=8192, theta=1e7, max_seq_len=262_144),
    "1.5-A2.7B": _2(60, 4, 1408, 5632, **_14B, ffn_dim=5632, max_seq_len=8192),
    "2-57B-A14B": _2(64, 8, 2560, 20480, **_57B, ffn_dim=18944, max_seq_len=131_072),
}

FORMATS = {"hf": FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=MOE_SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

"""gpt-oss in its published sizes, and a small one that trains on a laptop."""

from typing import Any

from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.moe.rows import MOE_SHARDING
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.gpt_oss.model import FORMAT, GptOssModel

_ROPE = RoPEConfig(
    theta=150_000.0, scaling="yarn_untruncated", scaling_factor=32.0, high_freq_factor=32.0, original_max_seq_len=4096
)
_ALL: Any = {"attention_bias": True, "layer_types": ["sliding_attention", "full_attention"], "rope": _ROPE}
_PUBLISHED = {**_ALL, "dim": 2880, "n_heads": 64, "n_kv_heads": 8, "head_dim": 64, "ffn_dim": 2880}
_PUBLISHED |= {"sliding_window": 128, "vocab_size": 201_088, "max_seq_len": 131_072}
_DEBUG = {**_ALL, **SMALL, "ffn_dim": 192, "head_dim": 64, "sliding_window": 64}

FLAVORS = {
    "debugmodel": GptOssModel.Config(**_DEBUG, moe=MoEConfig(n_experts=16, top_k=2)),
    "20B": GptOssModel.Config(**_PUBLISHED, n_layers=24, moe=MoEConfig(n_experts=32, top_k=4)),
    "120B": GptOssModel.Config(**_PUBLISHED, n_layers=36, moe=MoEConfig(n_experts=128, top_k=4)),
}

FORMATS = {"hf": FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=MOE_SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

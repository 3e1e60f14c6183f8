"""gpt-oss in its published sizes, and a small one that trains on a laptop."""

from typing import Any

from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.moe.rows import MOE_SHARDING
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.gpt_oss.model import FORMAT, GptOssModel

_DEBUG: Any = {**SMALL, "ffn_dim": 192, "head_dim": 64, "attention_bias": True, "sliding_window": 64}
_DEBUG |= {"layer_types": ["sliding_attention", "full_attention"], "rope": RoPEConfig(theta=10_000.0)}
_KEYS = {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64}
_KEYS |= {"vocab_size": 201_088, "max_position_embeddings": 131_072}

FLAVORS = {
    "debugmodel": GptOssModel.Config(**_DEBUG, moe=MoEConfig(n_experts=16, top_k=2)),
    "20B": FORMAT.from_external({**_KEYS, "num_hidden_layers": 24, "num_local_experts": 32}),
    "120B": FORMAT.from_external({**_KEYS, "num_hidden_layers": 36}),
}

FORMATS = {"hf": FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=MOE_SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

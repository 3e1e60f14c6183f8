"""Hunyuan's dense models and Hunyuan-A13B in their published sizes, and small ones that train on a
laptop."""

from functools import partial

from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, of_sizes
from torchtitan.models.hunyuan.model import FORMAT, GGUF, HunyuanModel, HunyuanMoeModel

_ROPE = RoPEConfig(theta=10_000.0)
_EXPERTS = MoEConfig(n_experts=32, top_k=4, n_shared_experts=1)
_SHARED = {
    **{"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
}
_dense = partial(of_sizes, FORMAT, "hunyuan_v1_dense", max_seq_len=262_144, **_SHARED)
_A13B = {**_SHARED, "num_experts": 64, "moe_topk": 8}

FLAVORS = {
    "debugmodel": HunyuanModel.Config(**SMALL, tie_embeddings=True, rope=_ROPE),
    "moe-debugmodel": HunyuanMoeModel.Config(
        **(SMALL | {"ffn_dim": 128}), tie_embeddings=True, rope=_ROPE, moe=_EXPERTS
    ),
    "0.5B": _dense(1024, 3584, 24, 16, 120_818),
    "1.8B": _dense(2048, 6144, 32, 16, 120_818, num_key_value_heads=4),
    "4B": _dense(3072, 8192, 36, 32, 120_818),
    "7B": _dense(4096, 14336, 32, 32, 128_167),
    "80B-A13B": of_sizes(
        FORMAT, "hunyuan_v1_moe", 4096, 3072, 32, 32, 128_167, max_seq_len=32_768, **_A13B
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

"""The models of Qwen3, Qwen2 and Qwen1.5 with experts, in their published sizes, and small ones for
a laptop."""

from functools import partial

from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, of_sizes
from torchtitan.models.qwen3_moe.model import FORMAT, GGUF, Qwen2MoeModel, Qwen3MoeModel

_ROPE = RoPEConfig(theta=10_000.0)
_SMALL_3 = MoEConfig(n_experts=32, top_k=4, ffn_dim=96)
_SMALL_2 = MoEConfig(n_experts=16, top_k=2, ffn_dim=96, norm_topk_prob=False, shared_ffn_dim=192)

_2 = partial(of_sizes, FORMAT, "qwen2_moe", rope_theta=1e6)
_3 = partial(
    of_sizes,
    FORMAT,
    "qwen3_moe",
    norm_topk_prob=True,
    head_dim=128,
    rope_theta=1e6,
    max_seq_len=40_960,
)
_480B = {
    "num_experts": 160,
    "moe_intermediate_size": 2560,
    "num_key_value_heads": 8,
    "rope_theta": 1e7,
}
_57B = {
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2560,
    "num_key_value_heads": 4,
}

FLAVORS = {
    "debugmodel": Qwen3MoeModel.Config(
        **SMALL, norm_eps=1e-6, rope=_ROPE, head_dim=64, moe=_SMALL_3
    ),
    "2-debugmodel": Qwen2MoeModel.Config(
        **SMALL, norm_eps=1e-6, rope=_ROPE, attention_bias=True, moe=_SMALL_2
    ),
    "30B-A3B": _3(2048, 6144, 48, 32, 151_936),
    "235B-A22B": _3(4096, 12288, 94, 64, 151_936, moe_intermediate_size=1536),
    "Coder-480B-A35B": _3(6144, 8192, 62, 96, 151_936, max_seq_len=262_144, **_480B),
    "1.5-A2.7B": _2(2048, 5632, 24, 16, 151_936, max_seq_len=8192),
    "2-57B-A14B": _2(
        3584,
        18944,
        28,
        28,
        151_936,
        max_seq_len=131_072,
        shared_expert_intermediate_size=20480,
        **_57B,
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

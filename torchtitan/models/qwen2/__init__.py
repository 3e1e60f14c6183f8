"""Qwen2 and Qwen2.5 in their published sizes, and a small one that trains on a laptop."""

from functools import partial

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.qwen2.model import FORMAT, GGUF, Qwen2Model

_ROPE = RoPEConfig(theta=1_000_000.0)
_small = partial(
    Qwen2Model.Config,
    vocab_size=151_936,
    norm_eps=1e-6,
    rope=_ROPE,
    n_kv_heads=2,
    tie_embeddings=True,
)
_0_5B = partial(_small, dim=896, n_layers=24, n_heads=14, ffn_dim=4864)
_1_5B = partial(_small, dim=1536, n_layers=28, n_heads=12, ffn_dim=8960)
_large = partial(
    Qwen2Model.Config, vocab_size=152_064, max_seq_len=131_072, norm_eps=1e-6, rope=_ROPE
)
_7B = partial(_large, dim=3584, n_layers=28, n_heads=28, n_kv_heads=4, ffn_dim=18944)
_14B = partial(
    _large, dim=5120, n_layers=48, n_heads=40, n_kv_heads=8, ffn_dim=13824, norm_eps=1e-5
)
_32B = partial(
    _large, dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, ffn_dim=27648, norm_eps=1e-5
)
_72B = partial(
    _large, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=29568, norm_eps=1e-5
)

FLAVORS = {
    "debugmodel": Qwen2Model.Config(**SMALL, norm_eps=1e-6, rope=RoPEConfig(theta=10_000.0)),
    "2-0.5B": _0_5B(max_seq_len=131_072),
    "2-1.5B": _1_5B(max_seq_len=131_072),
    "2-7B": _7B(),
    "2-72B": _72B(),
    "2.5-0.5B": _0_5B(max_seq_len=32_768),
    "2.5-1.5B": _1_5B(max_seq_len=131_072),
    "2.5-3B": _small(dim=2048, n_layers=36, n_heads=16, ffn_dim=11008, max_seq_len=32_768),
    "2.5-7B": _7B(),
    "2.5-14B": _14B(),
    "2.5-32B": _32B(),
    "2.5-72B": _72B(),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

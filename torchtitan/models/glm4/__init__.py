"""GLM-4 9B and 32B in their published sizes, and a small one that trains on a laptop."""

from functools import partial

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, Sizes
from torchtitan.models.glm4.model import FORMAT, GGUF, GLM4Model, GLMModel

_HALF_ROTATED = RoPEConfig(theta=10_000.0, rotated_fraction=0.5)
_9B: Sizes = {
    "dim": 4096,
    "n_layers": 40,
    "n_heads": 32,
    "n_kv_heads": 2,
    "ffn_dim": 13696,
}
_32B: Sizes = {
    "dim": 6144,
    "n_layers": 61,
    "n_heads": 48,
    "n_kv_heads": 2,
    "ffn_dim": 23040,
}
_published = partial(GLM4Model.Config, vocab_size=151_552, rope=_HALF_ROTATED)
_first = partial(GLMModel.Config, **_9B, vocab_size=151_552, rope=_HALF_ROTATED, norm_eps=1.5625e-7)

FLAVORS = {
    "debugmodel": GLM4Model.Config(**SMALL, rope=_HALF_ROTATED),
    "9B": _first(max_seq_len=8192),
    "9B-chat": _first(max_seq_len=131_072),
    "9B-0414": _published(**_9B, max_seq_len=32_768),
    "32B-0414": _published(**_32B, max_seq_len=32_768, attention_bias=False),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

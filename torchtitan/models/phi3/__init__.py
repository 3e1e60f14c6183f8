"""Phi-3 and Phi-4 in published sizes, and a small one that trains on a laptop."""

from functools import partial

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, Sizes
from torchtitan.models.phi3.model import FORMAT, GGUF, Phi3Model

_MINI: Sizes = {
    "dim": 3072,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "ffn_dim": 8192,
}
_MEDIUM: Sizes = {
    "dim": 5120,
    "n_layers": 40,
    "n_heads": 40,
    "n_kv_heads": 10,
    "ffn_dim": 17920,
}
_4k = partial(
    Phi3Model.Config,
    vocab_size=32_064,
    max_seq_len=4096,
    sliding_window=2047,
    rope=RoPEConfig(theta=10_000.0),
)
_LONG = RoPEConfig(
    theta=10_000.0,
    rotated_fraction=0.75,
    scaling="longrope",
    scaling_factor=16.0,
    original_max_seq_len=128,
    short_factors=[1.0] * 12,
    long_factors=[1.0 + index for index in range(12)],
)

FLAVORS = {
    "debugmodel": Phi3Model.Config(**SMALL, rope=_LONG, sliding_window=64),
    "3-mini-4k": _4k(**_MINI),
    "3-medium-4k": _4k(**_MEDIUM),
    "4": Phi3Model.Config(
        **_MEDIUM, vocab_size=100_352, max_seq_len=16_384, rope=RoPEConfig(theta=250_000.0)
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

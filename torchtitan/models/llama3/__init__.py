"""Llama 3, 3.1 and 3.2 in their published sizes, and a small one that trains on a laptop."""

from functools import partial

from torchtitan.models.common.decoder import DENSE_SHARDING
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.llama3 import meta
from torchtitan.models.llama3.model import FORMAT, GGUF, Llama3Model

_published = partial(
    Llama3Model.Config, vocab_size=128_256, max_seq_len=131_072, rope=RoPEConfig(scaling_factor=8.0)
)
_small = partial(
    _published,
    n_kv_heads=8,
    ffn_dim=8192,
    tie_embeddings=True,
    rope=RoPEConfig(scaling_factor=32.0),
)

FLAVORS = {
    "debugmodel": Llama3Model.Config(**SMALL, rope=RoPEConfig(theta=10_000.0)),
    "1B": _small(dim=2048, n_layers=16, n_heads=32),
    "3B": _small(dim=3072, n_layers=28, n_heads=24),
    "8B": _published(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336),
    "70B": _published(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672),
    "405B": _published(dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53248),
}

SHARDING = DENSE_SHARDING
FORMATS = {"hf": FORMAT, "gguf": GGUF, "meta": meta.FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

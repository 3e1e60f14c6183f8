"""Llama 3, 3.1 and 3.2 in their published sizes, and a small one that trains on a laptop."""

from torchtitan.models.common.decoder import DENSE_SHARDING
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.llama3 import meta
from torchtitan.models.llama3.model import FORMAT, Llama3Model


def _published(*, rope_factor: float = 8.0, **sizes: int | bool) -> Llama3Model.Config:
    return Llama3Model.Config(
        vocab_size=128_256,
        max_seq_len=131_072,
        rope=RoPEConfig(scaling_factor=rope_factor),
        **sizes,  # type: ignore[arg-type]
    )


FLAVORS = {
    "debugmodel": Llama3Model.Config(**SMALL, rope=RoPEConfig(theta=10_000.0)),
    "1B": _published(
        dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, tie_embeddings=True, rope_factor=32.0
    ),
    "3B": _published(
        dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim=8192, tie_embeddings=True, rope_factor=32.0
    ),
    "8B": _published(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336),
    "70B": _published(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672),
    "405B": _published(dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53248),
}

SHARDING = DENSE_SHARDING
FORMATS = {"hf": FORMAT, "meta": meta.FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

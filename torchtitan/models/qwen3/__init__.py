"""The dense models of Qwen3 in their published sizes, and a small one that trains on a laptop."""

from functools import partial

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.qwen3.model import FORMAT, GGUF, Qwen3Model

_published = partial(
    Qwen3Model.Config, vocab_size=151_936, max_seq_len=40_960, n_kv_heads=8, norm_eps=1e-6
)
_published = partial(_published, rope=RoPEConfig(theta=1_000_000.0))

FLAVORS = {
    "debugmodel": Qwen3Model.Config(
        **SMALL, head_dim=64, norm_eps=1e-6, rope=RoPEConfig(theta=10_000.0)
    ),
    "0.6B": _published(
        dim=1024, n_layers=28, n_heads=16, head_dim=128, ffn_dim=3072, tie_embeddings=True
    ),
    "1.7B": _published(dim=2048, n_layers=28, n_heads=16, ffn_dim=6144, tie_embeddings=True),
    "4B": _published(
        dim=2560, n_layers=36, n_heads=32, head_dim=128, ffn_dim=9728, tie_embeddings=True
    ),
    "8B": _published(dim=4096, n_layers=36, n_heads=32, ffn_dim=12288),
    "14B": _published(dim=5120, n_layers=40, n_heads=40, ffn_dim=17408),
    "32B": _published(dim=5120, n_layers=64, n_heads=64, head_dim=128, ffn_dim=25600),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

"""Mistral 7B, Ministral, Nemo and Small in their published sizes, and a small one that trains on a
laptop."""

from functools import partial

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.mistral.model import FORMAT, GGUF, MistralModel

_published = partial(
    MistralModel.Config, n_heads=32, n_kv_heads=8, vocab_size=131_072, max_seq_len=32_768
)
_7B = partial(_published, dim=4096, n_layers=32, ffn_dim=14336)
_1E6, _1E8 = RoPEConfig(theta=1e6), RoPEConfig(theta=1e8)

FLAVORS = {
    "debugmodel": MistralModel.Config(**SMALL, sliding_window=64, rope=RoPEConfig(theta=10_000.0)),
    "7B-v0.1": _7B(vocab_size=32_000, sliding_window=4096, rope=RoPEConfig(theta=1e4)),
    "7B-v0.3": _7B(vocab_size=32_768, rope=_1E6),
    "Ministral-8B": _published(
        dim=4096, n_layers=36, ffn_dim=12288, sliding_window=32_768, rope=_1E8
    ),
    "Nemo-12B": _published(
        dim=5120, n_layers=40, head_dim=128, ffn_dim=14336, max_seq_len=131_072, rope=_1E6
    ),
    "Small-24B": _published(dim=5120, n_layers=40, head_dim=128, ffn_dim=32768, rope=_1E8),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

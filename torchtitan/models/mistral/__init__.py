"""Mistral 7B, Ministral, Ministral 3, Nemo and Small in their published sizes, and small ones that
train on a laptop."""

from functools import partial

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.mistral.model import FORMAT, GGUF, Ministral3Model, MistralModel

_published = partial(
    MistralModel.Config, n_heads=32, n_kv_heads=8, vocab_size=131_072, max_seq_len=32_768
)
_7B = partial(_published, dim=4096, n_layers=32, ffn_dim=14336)
_1E6, _1E8 = RoPEConfig(theta=1e6), RoPEConfig(theta=1e8)
_YARN = partial(RoPEConfig, scaling="yarn", high_freq_factor=32.0, attention_factor=1.0)
_3 = partial(
    Ministral3Model.Config,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    vocab_size=131_072,
    max_seq_len=262_144,
    llama_4_scaling_beta=0.1,
    rope=_YARN(theta=1e6, scaling_factor=16.0, original_max_seq_len=16_384),
)

FLAVORS = {
    "debugmodel": MistralModel.Config(**SMALL, sliding_window=64, rope=RoPEConfig(theta=10_000.0)),
    "3-debugmodel": Ministral3Model.Config(
        **SMALL,
        llama_4_scaling_beta=0.1,
        rope=_YARN(theta=1e4, scaling_factor=8.0, original_max_seq_len=128),
    ),
    "7B-v0.1": _7B(vocab_size=32_000, sliding_window=4096, rope=RoPEConfig(theta=1e4)),
    "7B-v0.3": _7B(vocab_size=32_768, rope=_1E6),
    "Ministral-8B": _published(
        dim=4096, n_layers=36, ffn_dim=12288, sliding_window=32_768, rope=_1E8
    ),
    "3-3B": _3(dim=3072, n_layers=26, ffn_dim=9216, tie_embeddings=True),
    "3-8B": _3(dim=4096, n_layers=34, ffn_dim=14336, head_dim=None),
    "3-14B": _3(
        dim=5120,
        n_layers=40,
        ffn_dim=16384,
        rope=_YARN(theta=1e9, scaling_factor=16.0, original_max_seq_len=16_384),
    ),
    "Nemo-12B": _published(
        dim=5120, n_layers=40, head_dim=128, ffn_dim=14336, max_seq_len=131_072, rope=_1E6
    ),
    "Small-24B": _published(dim=5120, n_layers=40, head_dim=128, ffn_dim=32768, rope=_1E8),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

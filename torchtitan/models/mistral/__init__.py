"""Mistral 7B, Ministral, Nemo and Small in their published sizes, and a small one that trains on a laptop."""

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import Family
from torchtitan.models.mistral.model import FORMAT, MistralModel

_HEADS = {"n_heads": 32, "n_kv_heads": 8}

FLAVORS = {
    "debugmodel": MistralModel.Config(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=768,
        max_seq_len=2048,
        sliding_window=64,
        rope=RoPEConfig(theta=10_000.0),
    ),
    "7B-v0.1": MistralModel.Config(
        dim=4096,
        n_layers=32,
        ffn_dim=14336,
        vocab_size=32_000,
        max_seq_len=32_768,
        sliding_window=4096,
        rope=RoPEConfig(theta=10_000.0),
        **_HEADS,
    ),
    "7B-v0.3": MistralModel.Config(
        dim=4096,
        n_layers=32,
        ffn_dim=14336,
        vocab_size=32_768,
        max_seq_len=32_768,
        rope=RoPEConfig(theta=1_000_000.0),
        **_HEADS,
    ),
    "Ministral-8B": MistralModel.Config(
        dim=4096,
        n_layers=36,
        ffn_dim=12288,
        vocab_size=131_072,
        max_seq_len=32_768,
        sliding_window=32_768,
        rope=RoPEConfig(theta=100_000_000.0),
        **_HEADS,
    ),
    "Nemo-12B": MistralModel.Config(
        dim=5120,
        n_layers=40,
        head_dim=128,
        ffn_dim=14336,
        vocab_size=131_072,
        max_seq_len=131_072,
        rope=RoPEConfig(theta=1_000_000.0),
        **_HEADS,
    ),
    "Small-24B": MistralModel.Config(
        dim=5120,
        n_layers=40,
        head_dim=128,
        ffn_dim=32768,
        vocab_size=131_072,
        max_seq_len=32_768,
        rope=RoPEConfig(theta=100_000_000.0),
        **_HEADS,
    ),
}

FORMATS = {"hf": FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

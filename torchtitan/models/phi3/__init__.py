"""Phi-3 and Phi-4 in published sizes, and a small one that trains on a laptop."""

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import Family
from torchtitan.models.phi3.model import FORMAT, Phi3Model

FLAVORS = {
    "debugmodel": Phi3Model.Config(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=768,
        max_seq_len=2048,
        sliding_window=64,
        rope=RoPEConfig(
            theta=10_000.0,
            rotated_fraction=0.75,
            scaling="longrope",
            scaling_factor=16.0,
            original_max_seq_len=128,
            short_factors=[1.0] * 12,
            long_factors=[1.0 + index for index in range(12)],
        ),
    ),
    "3-mini-4k": Phi3Model.Config(
        dim=3072,
        n_layers=32,
        n_heads=32,
        n_kv_heads=32,
        ffn_dim=8192,
        vocab_size=32_064,
        max_seq_len=4096,
        sliding_window=2047,
        rope=RoPEConfig(theta=10_000.0),
    ),
    "3-medium-4k": Phi3Model.Config(
        dim=5120,
        n_layers=40,
        n_heads=40,
        n_kv_heads=10,
        ffn_dim=17920,
        vocab_size=32_064,
        max_seq_len=4096,
        sliding_window=2047,
        rope=RoPEConfig(theta=10_000.0),
    ),
    "4": Phi3Model.Config(
        dim=5120,
        n_layers=40,
        n_heads=40,
        n_kv_heads=10,
        ffn_dim=17920,
        vocab_size=100_352,
        max_seq_len=16_384,
        rope=RoPEConfig(theta=250_000.0),
    ),
}

FORMATS = {"hf": FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

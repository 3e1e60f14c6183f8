"""SmolLM3 in its published size, and a small one that trains on a laptop."""

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.smollm3.model import FORMAT, GGUF, SmolLM3Model

FLAVORS = {
    "debugmodel": SmolLM3Model.Config(**SMALL, norm_eps=1e-6, rope=RoPEConfig(theta=10_000.0)),
    "3B": SmolLM3Model.Config(
        dim=2048,
        n_layers=36,
        n_heads=16,
        n_kv_heads=4,
        ffn_dim=11008,
        vocab_size=128_256,
        max_seq_len=65_536,
        norm_eps=1e-6,
        tie_embeddings=True,
        rope=RoPEConfig(theta=5_000_000.0),
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

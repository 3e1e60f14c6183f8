"""Mixtral in its published sizes, and a small one that trains on a laptop."""

from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, of_sizes
from torchtitan.models.mixtral.model import FORMAT, GGUF, MixtralModel

_8x22B = 6144, 16384, 56, 48

FLAVORS = {
    "debugmodel": MixtralModel.Config(
        **(SMALL | {"ffn_dim": 384}),
        moe=MoEConfig(n_experts=8, top_k=2),
        rope=RoPEConfig(theta=10_000.0),
    ),
    "8x7B": of_sizes(FORMAT, "mixtral", 4096, 14336, 32, 32, 32_000, max_seq_len=32_768),
    "8x22B": of_sizes(FORMAT, "mixtral", *_8x22B, 32_000, max_seq_len=65_536),
    "8x22B-v0.3": of_sizes(FORMAT, "mixtral", *_8x22B, 32_768, max_seq_len=65_536),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

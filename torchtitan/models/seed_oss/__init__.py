"""Seed-OSS in its published size, and a small one that trains on a laptop."""

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, of_sizes
from torchtitan.models.seed_oss.model import FORMAT, GGUF, SeedOssModel

FLAVORS = {
    "debugmodel": SeedOssModel.Config(**SMALL, norm_eps=1e-6, rope=RoPEConfig(theta=10_000.0)),
    "36B": of_sizes(
        FORMAT,
        "seed_oss",
        *(5120, 27648, 64, 80, 155_136),
        max_seq_len=524_288,
        rope_theta=1e7,
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

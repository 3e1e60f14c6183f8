"""OLMo Hybrid's model in its published size, and a small one that trains on a laptop."""

from torchtitan.models.common.mixers import hybrid_sharding
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, of_sizes
from torchtitan.models.olmo_hybrid.model import FORMAT, OlmoHybridModel

FLAVORS = {
    "debugmodel": OlmoHybridModel.Config(
        **SMALL,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=12,
        linear_value_head_dim=24,
        norm_eps=1e-6,
        rope=RoPEConfig(theta=1e4),
    ),
    "7B": of_sizes(
        FORMAT,
        "olmo_hybrid",
        *(3840, 11008, 32, 30, 100_352),
        max_seq_len=65_536,
        rope_theta=None,
    ),
}

FORMATS = {"hf": FORMAT}
SHARDING = hybrid_sharding(OlmoHybridModel.Config.mixers)
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

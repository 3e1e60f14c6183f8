"""EXAONE 4 and K-EXAONE in their published sizes, and small ones that train on a laptop."""

from functools import partial

from torchtitan.models.common.layer_types import one_full_of
from torchtitan.models.common.moe.layer import SMALL_SIGMOID
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.exaone.model import FORMAT, GGUF, Exaone4Model, ExaoneMoeModel
from torchtitan.models.families import SMALL, Family, of_sizes

_WINDOWS = one_full_of(4)
_ROPE = RoPEConfig(theta=10_000.0)
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_4 = partial(
    of_sizes, FORMAT, "exaone4", num_key_value_heads=8, rope_theta=1e6, rope_scaling=_LLAMA3
)
_K = {
    **{"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 128, "rope_theta": 1e6},
    **{"num_experts": 128, "moe_intermediate_size": 2048},
}

FLAVORS = {
    "debugmodel": Exaone4Model.Config(**SMALL, sliding_window=64, layer_types=_WINDOWS, rope=_ROPE),
    "moe-debugmodel": ExaoneMoeModel.Config(
        **SMALL, sliding_window=64, layer_types=_WINDOWS, rope=_ROPE, moe=SMALL_SIGMOID
    ),
    "4.0-1.2B": _4(
        *(2048, 4096, 30, 32, 102_400),
        max_seq_len=65_536,
        sliding_window=None,
        tie_word_embeddings=True,
    ),
    "4.0-32B": _4(*(5120, 27392, 64, 40, 102_400), max_seq_len=131_072),
    "K-236B-A23B": of_sizes(
        FORMAT, "exaone_moe", 6144, 18432, 48, 64, 153_600, max_seq_len=262_144, **_K
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

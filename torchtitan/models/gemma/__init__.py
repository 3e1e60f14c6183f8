"""Gemma 1, 2 and 3 in their published sizes, without vision encoders, and small ones that train on
a laptop."""

from functools import partial

from torchtitan.models.common.layer_types import one_full_of
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, of_sizes
from torchtitan.models.gemma.model import FORMAT, GGUF, Gemma2Model, Gemma3Model

_1, _2 = (partial(of_sizes, FORMAT, name, max_seq_len=8192) for name in ("gemma", "gemma2"))
_3 = partial(of_sizes, FORMAT, "gemma3_text", max_seq_len=32_768, sliding_window=512)
_FAR = {"rope_type": "linear", "factor": 8.0}
_3_LONG = partial(
    of_sizes, FORMAT, "gemma3_text", max_seq_len=131_072, sliding_window=1024, rope_scaling=_FAR
)
_2_27B = {"num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144}
_3_27B = {"num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168}

FLAVORS = {
    "debugmodel": Gemma3Model.Config(
        **SMALL,
        norm_eps=1e-6,
        tie_embeddings=True,
        rope=RoPEConfig(theta=10_000.0),
        local_rope=RoPEConfig(theta=1000.0),
        head_dim=64,
        sliding_window=64,
        query_pre_attn_scalar=64,
        layer_types=one_full_of(2),
    ),
    "2-debugmodel": Gemma2Model.Config(
        **SMALL,
        norm_eps=1e-6,
        tie_embeddings=True,
        rope=RoPEConfig(theta=10_000.0),
        head_dim=64,
        sliding_window=64,
        query_pre_attn_scalar=64,
        layer_types=one_full_of(2),
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "1-2B": _1(2048, 16384, 18, 8, 256_000, num_key_value_heads=1),
    "1-7B": _1(3072, 24576, 28, 16, 256_000),
    "2-2B": _2(2304, 9216, 26, 8, 256_000),
    "2-9B": _2(3584, 14336, 42, 16, 256_000, num_key_value_heads=8),
    "2-27B": _2(4608, 36864, 46, 32, 256_000, **_2_27B),
    "3-270M": _3(640, 2048, 18, 4, 262_144, num_key_value_heads=1),
    "3-1B": _3(1152, 6912, 26, 4, 262_144, num_key_value_heads=1),
    "3-4B": _3_LONG(2560, 10240, 34, 8, 262_208),
    "3-12B": _3_LONG(3840, 15360, 48, 16, 262_208, num_key_value_heads=8),
    "3-27B": _3_LONG(5376, 21504, 62, 32, 262_208, **_3_27B),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

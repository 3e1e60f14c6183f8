"""Gemma 1, 2 and 3 in their published sizes, without vision encoders, and small ones that train on a laptop."""

from typing import Any

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family
from torchtitan.models.gemma.model import FORMAT, Gemma2Model, Gemma3Model, GemmaModel

_ALL: dict[str, Any] = {"norm_eps": 1e-6, "tie_embeddings": True, "rope": RoPEConfig(theta=10_000.0)}
_1 = {**_ALL, "vocab_size": 256_000, "max_seq_len": 8192, "head_dim": 256}
_2 = {**_1, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_3 = {**_1, "vocab_size": 262_144, "max_seq_len": 32_768, "sliding_window": 512, "rope": RoPEConfig(theta=1e6)}
_FAR = RoPEConfig(theta=1e6, scaling="linear", scaling_factor=8.0)
_3_LONG = {**_1, "vocab_size": 262_208, "max_seq_len": 131_072, "sliding_window": 1024, "rope": _FAR}
_2_27B = {**_2, "head_dim": 128, "query_pre_attn_scalar": 144}
_3_27B = {**_3_LONG, "head_dim": 128, "query_pre_attn_scalar": 168}


def _sizes(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int) -> dict[str, Any]:
    return {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "ffn_dim": ffn_dim}


_DEBUG = {**_ALL, **SMALL, "head_dim": 64}
_DEBUG |= {"sliding_window": 64, "query_pre_attn_scalar": 64, "layer_types": ["sliding_attention", "full_attention"]}

FLAVORS = {
    "debugmodel": Gemma3Model.Config(**_DEBUG, local_rope=RoPEConfig(theta=1000.0)),
    "2-debugmodel": Gemma2Model.Config(**_DEBUG, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "1-2B": GemmaModel.Config(**{**_1, "head_dim": None}, **_sizes(2048, 18, 8, 1, 16384)),
    "1-7B": GemmaModel.Config(**_1, **_sizes(3072, 28, 16, 16, 24576)),
    "2-2B": Gemma2Model.Config(**_2, **_sizes(2304, 26, 8, 4, 9216)),
    "2-9B": Gemma2Model.Config(**_2, **_sizes(3584, 42, 16, 8, 14336)),
    "2-27B": Gemma2Model.Config(**_2_27B, **_sizes(4608, 46, 32, 16, 36864)),
    "3-270M": Gemma3Model.Config(**_3, **_sizes(640, 18, 4, 1, 2048)),
    "3-1B": Gemma3Model.Config(**_3, **_sizes(1152, 26, 4, 1, 6912)),
    "3-4B": Gemma3Model.Config(**_3_LONG, **_sizes(2560, 34, 8, 4, 10240)),
    "3-12B": Gemma3Model.Config(**_3_LONG, **_sizes(3840, 48, 16, 8, 15360)),
    "3-27B": Gemma3Model.Config(**_3_27B, **_sizes(5376, 62, 32, 16, 21504)),
}

FORMATS = {"hf": FORMAT}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry

"""Gemma 1, 2 and 3 for text (arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786), and their
Hugging Face format."""

from dataclasses import dataclass, field
from functools import partial
from typing import Unpack

from torch import nn

from torchtitan.models.common.attention import AttentionOptions
from torchtitan.models.common.blocks import SandwichBlock
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.gguf import TIED, Architecture, gguf_format, require_gguf
from torchtitan.models.common.hugging_face import (
    DENSE_ROWS,
    SANDWICH_ROWS,
    ModelType,
    dense_format,
    write_if,
)
from torchtitan.models.common.hugging_face_rope import write_rope
from torchtitan.models.common.layer_types import (
    WINDOW_KEYS,
    LayerType,
    ScaledEmbeddingDecoder,
    one_full_of,
)
from torchtitan.models.common.norms import OffsetRMSNorm
from torchtitan.models.common.rope import RoPEConfig


class GemmaModel(ScaledEmbeddingDecoder):
    """Gemma 1: Llama's decoder with norms times 1 + weight, GeGLU, and embeddings times the square
    root of `dim`."""

    norm_kind = OffsetRMSNorm


class Gemma2Model(GemmaModel):
    """Gemma with norms before and after each part of a block, windows in some layers, and soft
    caps."""

    @dataclass(kw_only=True, slots=True)
    class Config(GemmaModel.Config):
        query_pre_attn_scalar: int = 256
        """Attention scores are divided by its square root."""

        attn_logit_softcapping: float | None = None
        """Soft cap of the divided scores. None: no cap."""

        sliding_window: int = 4096
        """Tokens that a token sees in layers of type sliding_attention, including itself."""

        layer_types: list[LayerType] = field(default_factory=lambda: one_full_of(2))
        """Types of the first layers, repeated for the others."""

        def validate(self) -> None:
            GemmaModel.Config.validate(self)
            self.check_positive("query_pre_attn_scalar", "attn_logit_softcapping")

    config: Config
    block_kind = SandwichBlock

    def make_attention(self, index: int, **options: Unpack[AttentionOptions]) -> nn.Module:
        options.setdefault("scale", self.config.query_pre_attn_scalar**-0.5)
        return super().make_attention(index, **options)

    def score_softcap(self) -> float | None:
        return self.config.attn_logit_softcapping


class Gemma3Model(Gemma2Model):
    """Gemma 2 with norms of queries and keys, and another RoPE in layers with windows."""

    @dataclass(kw_only=True, slots=True)
    class Config(Gemma2Model.Config):
        layer_types: list[LayerType] = field(default_factory=lambda: one_full_of(6))
        """Types of the first layers, repeated for the others."""

        local_rope: RoPEConfig = field(default_factory=lambda: RoPEConfig(theta=10_000.0))
        """Rotary position embedding of layers of type sliding_attention. The others use `rope`."""

    has_qk_norm = True


_BASES = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
"""Section of `rope_parameters` → its base in older files: key and default."""


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json without keys that older files leave open: there, "gelu" and null mean
    GELU by tanh."""
    unsaid = {"hidden_act": "gelu", "hidden_activation": None}
    return {
        key: value for key, value in document.items() if key not in unsaid or value != unsaid[key]
    }


def _prepare_gemma3(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with `layer_types` for its pattern, and RoPE by type of layer, else
    raise `UserError`."""
    document = _prepare(document)
    reader = ConfigReader("config.json", {"sliding_window_pattern": 6, **document})
    period, n_layers = reader.whole_number("sliding_window_pattern"), reader.n_layers()
    if period != 6:
        types = [
            "sliding_attention" if (index + 1) % period else "full_attention"
            for index in range(n_layers)
        ]
        document.setdefault("layer_types", types)
    sections = reader.section("rope_parameters").values
    ropes = {"rope_parameters": sections} if sections else {}
    if reader.has("rope_scaling") or not sections:
        ropes["rope_scaling"] = {
            **sections,
            "full_attention": reader.section("rope_scaling").values,
        }
    bases = {name: document.pop(key, default) for name, (key, default) in _BASES.items()}
    for key, rope in ropes.items():
        values = ConfigReader("config.json", rope)
        with_bases = {
            name: {"rope_theta": base, **values.section(name).values}
            for name, base in bases.items()
        }
        document[key] = {**rope, **with_bases}
    return document


_model_type = partial(
    ModelType, fixed=dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
)
_DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}
# Published files omit these three keys.
_DEFAULTS3 = {
    **_DEFAULTS,
    "num_attention_heads": 8,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}
_NAMES = (
    "attention_bias",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
    "attn_logit_softcapping",
)
_KEYS = {name: name for name in _NAMES} | WINDOW_KEYS

_GEMMA3 = _model_type(
    architecture="Gemma3ForCausalLM",
    config=Gemma3Model.Config,
    rows=SANDWICH_ROWS,
    # transformers reads a soft cap of scores, but does not compute it.
    keys={key: name for key, name in _KEYS.items() if key != "attn_logit_softcapping"},
    defaults=_DEFAULTS3,
    ignored=("_sliding_window_pattern", "sliding_window_pattern"),
    prepare=_prepare_gemma3,
    write=write_if(
        lambda config: config.dim % config.n_heads == 0,
        # For transformers 4, which does not read `rope_parameters`.
        lambda c: {**write_rope(c.rope, c.max_seq_len), "rope_local_base_freq": c.local_rope.theta},
    ),
)

FORMAT = dense_format(
    {
        "gemma": _model_type(
            architecture="GemmaForCausalLM",
            config=GemmaModel.Config,
            rows=DENSE_ROWS,
            keys={"attention_bias": "attention_bias"},
            defaults={"tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 16},
            prepare=_prepare,
        ),
        "gemma2": _model_type(
            architecture="Gemma2ForCausalLM",
            config=Gemma2Model.Config,
            rows=SANDWICH_ROWS,
            keys=_KEYS,
            defaults={**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            prepare=_prepare,
            # required by transformers
            write=write_if(lambda config: config.dim % config.n_heads == 0),
        ),
        "gemma3_text": _GEMMA3,
        "gemma3": _GEMMA3,
    },
    without=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)

_LARGEST = {Gemma2Model.Config: 46, Gemma3Model.Config: 62}
"""Layers of the 27B models, whose scores have another scale; llama.cpp knows them by the number."""


def _gguf_scores(config: Gemma2Model.Config) -> dict[str, object]:
    """Return the metadata of Gemma 2's attention. Raise `UserError` for another scale of scores
    than llama.cpp's."""
    is_largest = config.n_layers == _LARGEST[type(config)]
    usual = config.dim // config.n_heads if is_largest else config.resolved_head_dim
    scalar = config.query_pre_attn_scalar
    require_gguf(scalar == usual, "query_pre_attn_scalar", scalar, f"{usual} in such a model")
    cap = config.attn_logit_softcapping
    return {} if cap is None else {"attn_logit_softcapping": float(cap)}


def _gguf_logits(config: GemmaModel.Config) -> dict[str, object]:
    cap = config.final_logit_softcapping
    return {} if cap is None else {"final_logit_softcapping": float(cap)}


def _gguf_1(config: GemmaModel.Config) -> dict[str, object]:
    cap = config.final_logit_softcapping
    require_gguf(cap is None, "final_logit_softcapping", cap, "None in Gemma 1")
    return {}


def _gguf_2(config: Gemma2Model.Config) -> dict[str, object]:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        require_gguf(getattr(config, name) is not None, name, None, "caps in Gemma 2")
    return _gguf_scores(config) | _gguf_logits(config)


def _gguf_3(config: Gemma3Model.Config) -> dict[str, object]:
    cap, local = config.attn_logit_softcapping, config.local_rope
    require_gguf(cap is None, "attn_logit_softcapping", cap, "None in Gemma 3")
    require_gguf(not local.is_scaled, "local_rope.scaling", local.scaling, "unscaled windows")
    base = {"rope.freq_base_swa": float(local.theta)}
    return base | _gguf_scores(config) | _gguf_logits(config)


GGUF = gguf_format(
    Architecture(name="gemma", config=GemmaModel.Config, tying=TIED, keys=_gguf_1),
    Architecture(
        name="gemma2", config=Gemma2Model.Config, tying=TIED, windows=one_full_of(2), keys=_gguf_2
    ),
    Architecture(name="gemma3", config=Gemma3Model.Config, windows=one_full_of(6), keys=_gguf_3),
)

"""OLMo 2 and 3 (arXiv:2501.00656, arXiv:2512.13961), and their Hugging Face formats."""

from dataclasses import dataclass, field
from functools import partial
from typing import Unpack

from torch import nn

from torchtitan.models.common.attention import AttentionOptions
from torchtitan.models.common.blocks import PostNormBlock
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.gguf import Architecture, Tying, gguf_format, require_gguf
from torchtitan.models.common.hugging_face import ModelType, dense_format, dense_rows
from torchtitan.models.common.hugging_face_rope import write_rope
from torchtitan.models.common.layer_types import (
    WINDOW_KEYS,
    LayerType,
    WindowedDecoder,
    one_full_of,
)
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.tools.errors import UserError


class Olmo2Model(WindowedDecoder):
    """Llama's decoder with the norms after attention and feed-forward network, and norms over all
    queries and all keys of a token."""

    block_kind = PostNormBlock

    def make_attention(self, index: int, **options: Unpack[AttentionOptions]) -> nn.Module:
        options.setdefault("qk_wide_norm", self.make_norm)
        return super().make_attention(index, **options)


class Olmo3Model(Olmo2Model):
    """OLMo 2 with windows in three of four layers. Only the RoPE of the other layers is scaled for
    long contexts."""

    @dataclass(kw_only=True, slots=True)
    class Config(Olmo2Model.Config):
        sliding_window: int = 4096
        """Tokens that a token sees in layers of type sliding_attention, including itself."""

        layer_types: list[LayerType] = field(default_factory=lambda: one_full_of(4))
        """Types of the first layers, repeated for the others."""

        local_rope: RoPEConfig = field()
        """Rotary position embedding of layers of type sliding_attention; the others have `rope`."""


_OLMO_3_THETA = 500_000.0


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json whose `rope_scaling` is under the type of layers that it holds for.
    Raise `UserError` for RoPE that transformers 4 and 5 read differently."""
    reader = ConfigReader("config.json", document)
    scaling, parameters = reader.section("rope_scaling"), reader.section("rope_parameters")
    if scaling.values:
        document["rope_scaling"] = {"full_attention": scaling.values}
    theta, sections = (
        reader.number("rope_theta", _OLMO_3_THETA),
        ("full_attention", "sliding_attention"),
    )
    if theta != _OLMO_3_THETA and not all(
        parameters.section(name).has("rope_theta") for name in sections
    ):
        raise UserError(
            f"config.json: rope_theta is {theta}, which transformers 5 does not apply to all "
            "layers; set it in each section of rope_parameters"
        )
    return document


def _rope_for_transformers_4(config: Olmo3Model.Config) -> dict[str, object]:
    """Return the keys of RoPE of transformers 4, if they can describe the model: they scale full
    attention only."""
    is_plain = config.local_rope == RoPEConfig(theta=config.rope.theta)
    return write_rope(config.rope, config.max_seq_len) if is_plain else {}


_ROWS = dense_rows(
    attention_post_norm="post_attention_layernorm", ffn_post_norm="post_feedforward_layernorm"
)

FORMAT = dense_format(
    {
        "olmo2": ModelType(
            architecture="Olmo2ForCausalLM",
            config=Olmo2Model.Config,
            rows=_ROWS,
            keys={"attention_bias": "attention_bias"},
            defaults={"rms_norm_eps": 1e-5},
        ),
        "olmo3": ModelType(
            architecture="Olmo3ForCausalLM",
            config=Olmo3Model.Config,
            rows=_ROWS,
            keys={**WINDOW_KEYS, "attention_bias": "attention_bias"},
            defaults={"rms_norm_eps": 1e-5, "rope_theta": _OLMO_3_THETA},
            prepare=_prepare,
            write=_rope_for_transformers_4,
        ),
    }
)


def _gguf_windows(config: Olmo3Model.Config) -> dict[str, object]:
    """Raise `UserError` unless layers with windows have the other layers' RoPE, unscaled."""
    theta = config.local_rope.theta
    fits = not config.local_rope.is_scaled and theta == config.rope.theta
    require_gguf(fits, "local_rope.theta", theta, f"{config.rope.theta}, unscaled")
    return {}


_architecture = partial(Architecture, name="olmo2", any_head_width=False, tying=Tying(copies=True))

GGUF = gguf_format(
    _architecture(config=Olmo2Model.Config),
    _architecture(config=Olmo3Model.Config, windows=one_full_of(4), keys=_gguf_windows),
)

"""Decoders whose layers attend to different tokens in a repeating pattern, also with scaled
embeddings."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.feed_forward import GatedFeedForward, gelu_tanh
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.protocols.initializer import TruncatedNormal
from torchtitan.protocols.output_head import LogitTransform
from torchtitan.tools.errors import UserError, require

LayerType = Literal["full_attention", "sliding_attention"]
"""As in `layer_types` of transformers."""

WINDOW_KEYS = {"sliding_window": "sliding_window", "layer_types": "layer_types"}
"""`ModelType.keys` of windows."""


def one_full_of(n_layers: int) -> list[LayerType]:
    """Return the types of a pattern of layers with windows, except in the last."""
    windows: list[LayerType] = ["sliding_attention"] * (n_layers - 1)
    return [*windows, "full_attention"]


class WindowedDecoder(Decoder):
    """A decoder with sliding windows, in some layers or in all."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        sliding_window: int | None = None
        """Tokens that a token sees in layers of type sliding_attention, including itself. None: all
        earlier ones."""

        layer_types: list[LayerType] = field(default_factory=lambda: ["sliding_attention"])
        """Types of the first layers, repeated for the others."""

        @property
        def local_rope(self) -> RoPEConfig:
            """Rotary position embedding of layers of type sliding_attention; a field in families
            where it differs."""
            return self.rope

        def has_window(self, index: int) -> bool:
            """Return whether a layer is of type sliding_attention."""
            return self.layer_types[index % len(self.layer_types)] == "sliding_attention"

        def validate(self) -> None:
            Decoder.Config.validate(self)
            self.check_sizes(2**32, "sliding_window")
            require(
                bool(self.layer_types), "--model.layer_types", self.layer_types, "at least one type"
            )
            self.local_rope.validate(self.resolved_head_dim)

    config: Config

    def rope_of_layer(self, index: int) -> RoPEConfig | None:
        return self.config.local_rope if self.config.has_window(index) else self.config.rope

    def window_of_layer(self, index: int) -> int | None:
        return self.config.sliding_window if self.config.has_window(index) else None


class ScaledEmbeddingDecoder(WindowedDecoder):
    """A decoder with embeddings times the square root of `dim`, GeGLU, and a soft cap of the
    logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(WindowedDecoder.Config):
        final_logit_softcapping: float | None = None
        """Soft cap of the logits. None: no cap."""

        def validate(self) -> None:
            WindowedDecoder.Config.validate(self)
            self.check_positive("final_logit_softcapping")

    config: Config

    def make_feed_forward(
        self, index: int, kind: Callable[..., nn.Module] = GatedFeedForward, **options: object
    ) -> nn.Module | None:
        return super().make_feed_forward(index, kind, activation=gelu_tanh, **options)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        hidden_BLD = super().embed(tokens_BL)
        # Rounded first, as in the reference: in bfloat16, the square root of 3072 is 55.5.
        return hidden_BLD * torch.tensor(self.config.dim**0.5, dtype=hidden_BLD.dtype).item()

    def embedding_init(self) -> TruncatedNormal:
        return TruncatedNormal(self.config.dim**-0.5)

    def logit_transform(self) -> LogitTransform:
        return LogitTransform(softcap=self.config.final_logit_softcapping)


def prepare_windows(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with `layer_types` if it has windows, and without the keys that Qwen's
    older files use instead (`ModelType.prepare`). Raise `UserError` for contradictory keys."""
    reader = ConfigReader(
        "config.json", {"sliding_window": 4096, "max_window_layers": 28, **document}
    )
    has_window = reader.flag("use_sliding_window", False) and reader.has("sliding_window")
    others = {
        k: v
        for k, v in document.items()
        if k not in (*WINDOW_KEYS, "use_sliding_window", "max_window_layers")
    }
    types = document.get("layer_types")
    if not has_window:
        if types and not (
            isinstance(types, list) and all(kind == "full_attention" for kind in types)
        ):
            raise UserError(
                f"config.json: layer_types is {types!r}, but use_sliding_window is not true"
            )
        return others
    if types is None:
        first, n_layers = reader.whole_number("max_window_layers", least=0), reader.n_layers()
        types = [
            "full_attention" if index < first else "sliding_attention" for index in range(n_layers)
        ]
    return {**others, "sliding_window": reader.values["sliding_window"], "layer_types": types}

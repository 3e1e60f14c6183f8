"""What all generations of Gemma share."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.models.common.feed_forward import gelu_tanh
from torchtitan.models.common.layer_types import WindowedDecoder
from torchtitan.protocols.initializer import TruncatedNormal
from torchtitan.protocols.output_head import LogitTransform
from torchtitan.tools.errors import UserError


class ScaledEmbeddingDecoder(WindowedDecoder):
    """A decoder with embeddings times the square root of `dim`, GeGLU, and a soft cap of the logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(WindowedDecoder.Config):
        final_logit_softcapping: float | None = None
        """Soft cap of the logits. None: there is none."""

        def validate(self) -> None:
            WindowedDecoder.Config.validate(self)
            cap = self.final_logit_softcapping
            if cap is not None and not 0 < cap < math.inf:
                raise UserError(f"--model.final_logit_softcapping is {cap}, but must be above 0")

    config: Config

    def make_feed_forward(self, *args: Any, **options: Any) -> nn.Module:
        return super().make_feed_forward(*args, activation=gelu_tanh, **options)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        hidden_BLD = super().embed(tokens_BL)
        # Rounded first, as in the reference: in bfloat16, the square root of 3072 is 55.5.
        return hidden_BLD * torch.tensor(self.config.dim**0.5, dtype=hidden_BLD.dtype).item()

    def embedding_init(self) -> TruncatedNormal:
        return TruncatedNormal(self.config.dim**-0.5)

    def logit_transform(self) -> LogitTransform:
        return LogitTransform(softcap=self.config.final_logit_softcapping)

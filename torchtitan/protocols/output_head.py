"""Output heads: functions of the last hidden states and the output weights, such as a loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Head = Callable[..., Tensor]
"""Computes logits or the loss: `head(hidden_BLD, weight_VD, **named inputs)`. A model that changes its logits also
passes `transform`, a `LogitTransform`; one that computes its logits itself passes them as `hidden_BLD`, and None."""


@dataclass(frozen=True)
class LogitTransform:
    """Change of logits x before the softmax: `c tanh(m x / c)`, with multiplier m (Cohere, Granite) and soft cap c
    (Gemma 2, arXiv:2408.00118), or `m x` without a soft cap."""

    multiplier: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the changed logits, of the same shape and type."""
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


UNCHANGED = LogitTransform()


def compute_logits(hidden_BLD: Tensor, weight_VD: Tensor | None, transform: LogitTransform = UNCHANGED) -> Tensor:
    """Return the logits (B, L, V); hidden states and weights may be DTensors on the same mesh."""
    return transform(hidden_BLD if weight_VD is None else F.linear(hidden_BLD, weight_VD))

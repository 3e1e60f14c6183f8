"""Output heads: functions of the last hidden states and the output weights, such as a loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.tools.errors import UserError

Head = Callable[..., Tensor]
"""Computes logits or the loss: `head(hidden_BLD, weight_VD, **named inputs)`. A model that changes
its logits also passes `transform`, a `LogitTransform`; one that computes its logits itself passes
them as `hidden_BLD`, and None."""


@dataclass(frozen=True)
class LogitTransform:
    """Transform of logits x before the softmax: `c tanh(m x / c)`, with multiplier m (Cohere,
    Granite) and soft cap c (Gemma 2, arXiv:2408.00118), or `m x` without a soft cap; divided by the
    temperature of sampling."""

    multiplier: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the changed logits, of the same shape and type."""
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.temperature == 1.0 else logits / self.temperature


UNCHANGED = LogitTransform()


def check_scores(weight_VD: Tensor, head: Head) -> None:
    """Raise `UserError` if the output weights of a reward model meet the head of a language model,
    or the other way around: scores are `torch.nn.functional.linear` of the hidden states."""
    gives_scores = head is F.linear
    if (len(weight_VD) == 1) != gives_scores:
        found = "no" if gives_scores else "a"
        raise UserError(f"the model is {found} reward model; choose another model")


def with_further_tokens(
    head: Head,
    modules: Sequence[Callable[..., Tensor]],
    tokens_BL: Tensor,
    positions_BL: Tensor,
    weight: float,
) -> Head:
    """Return a loss with the value of the summed loss `head`, and the gradient of that plus
    `weight` times the mean of the modules' losses (DeepSeek-V3, arXiv:2412.19437, equation 25).
    `module(states, tokens)` returns the next states; the k-th gets the tokens k later, and no label
    of the next document. It runs while FSDP has the output weights."""

    def shift(x_BL: Tensor, k: int, last: int) -> Tensor:
        return F.pad(x_BL[:, k:], (0, min(k, x_BL.shape[1])), value=last)

    def loss_of(
        hidden_BLD: Tensor, weight_VD: Tensor | None, labels_BL: Tensor, **inputs: object
    ) -> Tensor:
        losses = [head(hidden_BLD, weight_VD, labels_BL=labels_BL, **inputs)]
        for k, module in enumerate(modules, start=1):
            hidden_BLD = module(hidden_BLD, shift(tokens_BL, k, 0))
            later_BL = shift(labels_BL, k, -100).where(
                shift(positions_BL, k, -1) == positions_BL + k, -100
            )
            losses.append(head(hidden_BLD, weight_VD, labels_BL=later_BL, **inputs))
        further = weight * torch.stack(losses[1:]).mean()
        return losses[0] + (further - further.detach())

    return loss_of


def compute_logits(
    hidden_BLD: Tensor, weight_VD: Tensor | None, transform: LogitTransform = UNCHANGED
) -> Tensor:
    """Return the logits (B, L, V); hidden states and weights may be DTensors on the same mesh."""
    return transform(hidden_BLD if weight_VD is None else F.linear(hidden_BLD, weight_VD))

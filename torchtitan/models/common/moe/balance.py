"""Means against idle experts: auxiliary losses of routers, and a bias of the choice.

E experts, K of them per token. An auxiliary loss is a sum over tokens, of which the training loop takes the mean over
the tokens of the global batch, padding included.
"""

import torch
from torch import Tensor, nn

from torchtitan.protocols.initializer import Constant, with_initializers


class Penalty(nn.Module):
    """An auxiliary loss with a `weight`."""

    needs_load = False
    """As in `LoadBalanced`."""

    def __init__(self, weight: float):
        super().__init__()
        self.weight = weight

    def forward(self, logits_BLE: Tensor, scores_BLE: Tensor, counts_BE: Tensor) -> Tensor:
        """Return the loss, summed over these tokens; `counts_BE` counts the tokens of a row that each expert gets."""
        raise NotImplementedError

    def use_load(self, counts_E: Tensor) -> None:
        """As in `LoadBalanced`."""


class BatchBalance(Penalty):
    """`E sum_i f_i P_i`, with f_i the share of expert i in all choices and P_i its mean score, both over the global
    batch: 1 if all experts are equally busy (Switch, arXiv:2101.03961, equation 4; over the global batch:
    arXiv:2501.11873).

    The shares of a global batch are known only after the forward passes of all its micro-batches on all ranks, but the
    first backward pass needs them. So each step begins with forward passes that only count; other losses do not need
    that. Shares have no gradient, so nothing else is computed twice.
    """

    needs_load = True

    def __init__(self, weight: float):
        super().__init__(weight)
        self.shares_E: Tensor | None = None

    def use_load(self, counts_E: Tensor) -> None:
        self.shares_E = counts_E / counts_E.sum().clamp(min=1)

    def forward(self, logits_BLE: Tensor, scores_BLE: Tensor, counts_BE: Tensor) -> Tensor:
        assert self.shares_E is not None, "call LoadBalancer.measuring before the step's backward passes"
        factors_E = self.weight * len(self.shares_E) * self.shares_E.float()
        return (probabilities(scores_BLE) * factors_E).sum()


class SequenceBalance(Penalty):
    """The same within each row of tokens, then the mean over rows (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20).
    Packed documents count together."""

    def __init__(self, weight: float):
        super().__init__(weight)
        self.row_sums = nn.Identity()
        """Counts of a rank's part of each row → counts of the whole rows; parallelism adds the other ranks' counts."""

    def forward(self, logits_BLE: Tensor, scores_BLE: Tensor, counts_BE: Tensor) -> Tensor:
        counts_BE = self.row_sums(counts_BE)
        factors_BE = self.weight * counts_BE.shape[-1] * counts_BE / counts_BE.sum(dim=-1, keepdim=True).clamp(min=1)
        return (probabilities(scores_BLE) * factors_BE[:, None]).sum()


class ZLoss(Penalty):
    """The squared log-sum-exp of the logits, which keeps them small (ST-MoE, arXiv:2202.08906, equation 5)."""

    def forward(self, logits_BLE: Tensor, scores_BLE: Tensor, counts_BE: Tensor) -> Tensor:
        return self.weight * logits_BLE.logsumexp(dim=-1).square().sum()


class SelectionBias(nn.Module):
    """A bias of each expert, added to its scores for the choice only. After each optimizer step, it rises by `rate` for
    experts with fewer tokens than the mean of the global batch, and falls for those with more (arXiv:2408.15664)."""

    def __init__(self, n_experts: int, rate: float):
        super().__init__()
        self.rate = rate
        self.bias_E: Tensor
        self.register_buffer("bias_E", torch.zeros(n_experts, dtype=torch.float32))
        with_initializers(self, bias_E=Constant(0.0))

    def forward(self, scores_BLE: Tensor) -> Tensor:
        return scores_BLE + self.bias_E.to(scores_BLE.device)  # it stays in CPU memory if weights are offloaded

    @torch.no_grad()
    def update(self, counts_E: Tensor) -> None:
        counts = counts_E.to(self.bias_E.device).double()
        self.bias_E += self.rate * torch.sign(counts.mean() - counts).to(self.bias_E.dtype)


def probabilities(scores: Tensor) -> Tensor:
    """Scores that add up to 1 for each token."""
    return scores / scores.sum(dim=-1, keepdim=True)

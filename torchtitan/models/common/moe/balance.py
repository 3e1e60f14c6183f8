"""Means against idle experts: auxiliary losses of routers, and a bias of the choice.

E experts, K of them per token. An auxiliary loss is a sum over tokens, of which the training loop takes the mean over
the tokens of the global batch, padding included.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtitan.protocols.initializer import Constant, with_initializers


@dataclass(kw_only=True, slots=True)
class PenaltyConfig:
    """Weights of the auxiliary losses, which are means over tokens, added over layers. They change gradients, but not
    the logged loss.

    - Load balance: `E sum_i f_i P_i`, with f_i the share of expert i in all choices and P_i its mean score; 1 if all
      experts are equally busy. Shares have no gradient. Both are over the global batch (Switch, arXiv:2101.03961,
      equation 4; arXiv:2501.11873), or within each row of tokens, then the mean over rows (DeepSeek-V3,
      arXiv:2412.19437, equations 17 to 20; packed documents count together).
    - The squared log-sum-exp of the logits, which keeps them small (ST-MoE, arXiv:2202.08906, equation 5).

    The shares of a global batch are known only after the forward passes of all its micro-batches on all ranks, but the
    first backward pass needs them. So each step begins with forward passes that only count.
    """

    batch_loss: float = 0.0
    """Weight of the load-balancing loss over the global batch (Switch, GShard). Each step then begins with a forward
    pass over its tokens that only counts."""

    sequence_loss: float = 0.0
    """Weight of the load-balancing loss within each row of `training.seq_len` tokens (DeepSeek-V3)."""

    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the router's logits (ST-MoE)."""


def imbalance(scores_BLE: Tensor, counts: Tensor) -> Tensor:
    """Return the sum over tokens of the loss of an uneven load, whose mean is 1 if all experts are equally busy.
    `counts` (E,) or (B, 1, E) counts the tokens of each expert, in the global batch or in each row."""
    shares = counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)
    return counts.shape[-1] * (probabilities(scores_BLE) * shares).sum()


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

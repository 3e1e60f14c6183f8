"""`LoadBalanced`: what the training loop does for routers of tokens to experts, without knowing a model."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class LoadBalanced(nn.Module):
    """Base class of routers that keep their experts equally busy. `torchtitan.components.load_balance` sums `totals`
    over the ranks that see other tokens, and calls the methods.

    Auxiliary losses do not travel with the training loss, which only the last stage of a pipeline has, and which is
    divided by another number of tokens: a router adds their gradient in its own backward pass, multiplied by
    `gradient_scale`. That pass runs once per micro-batch, unlike the forward pass, which activation checkpointing
    repeats and validation runs without a step. So tokens are counted there too.
    """

    needs_load: bool = False
    """True if an auxiliary loss depends on `batch_counts_E`, which must be there before the first backward pass."""

    has_losses: bool = False
    """True if there are auxiliary losses."""

    batch_counts_E: Tensor | None = None
    """Tokens of the global batch that each expert gets with the current weights."""

    row_groups: Sequence[dist.ProcessGroup] = ()
    """Groups of ranks with other parts of the same rows of tokens, set by tensor and context parallelism."""

    def __init__(self, n_experts: int, top_k: int):
        super().__init__()
        self.n_experts, self.top_k = n_experts, top_k
        self.totals: Tensor | None = None
        """Since `start_step`, the number of tokens that this rank has sent to each expert, and as the last element the
        sum of the entropies of these tokens' probabilities, in 2⁻²⁰ of the largest, so that sums are exact: (E + 1),
        int64. None before the first step."""
        self.gradient_scale: Tensor | None = None
        """Factor of the auxiliary losses' gradients, a float32 scalar; the losses are sums over tokens."""
        self.is_measuring = False
        """True if forward passes count, because no backward pass follows."""

    def start_step(self, gradient_scale: Tensor) -> None:
        """Forget the totals, and let the auxiliary losses' gradients have a scale."""
        self.totals = torch.zeros(self.n_experts + 1, dtype=torch.int64, device=gradient_scale.device)
        self.gradient_scale = gradient_scale

    def whole_rows(self, counts: Tensor) -> Tensor:
        """Add counts of the other parts of each row, in place; return the result."""
        for group in self.row_groups:
            dist.all_reduce(counts, group=group)
        return counts

    def rebalance(self, counts_E: Tensor) -> None:
        """Adapt to the counts of the global batch, after an optimizer step."""

    def biases(self) -> Tensor | None:
        """Return the experts' biases that balance, if any."""
        return None

"""`LoadBalanced`: what the training loop does for routers of tokens to experts, without knowing a model."""

import torch
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
    """True if an auxiliary loss depends on the load of the whole global batch, which `use_load` must give before the
    first backward pass."""

    has_losses: bool = False
    """True if there are auxiliary losses."""

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

    def use_load(self, counts_E: Tensor) -> None:
        """Compute auxiliary losses with these counts, of the global batch of the current weights."""

    def rebalance(self, counts_E: Tensor) -> None:
        """Adapt to the counts of the global batch, after an optimizer step."""

    def biases(self) -> Tensor | None:
        """Return the experts' biases that balance, if any."""
        return None

"""`StackedExperts`: what expert parallelism needs to know of a layer's routed experts."""

from abc import abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor, nn

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""As `StackedExperts.forward`, for the experts of this rank: its tokens, and weights and numbers of their experts."""

Exchange = Callable[[Tensor, Tensor, Tensor, Compute], Tensor]
"""(rows_RD, weight_R, counts_E, compute) → (R, D): the results of the ranks that have the experts. Rows are tokens in
the order of their experts, with `counts_E` rows for each."""


class StackedExperts(nn.Module):
    """Base class of routed experts, whose parameters have the experts as dimension 0."""

    hidden_dims: Mapping[str, int] = {}
    """Parameter → its dimension over the experts' width, which expert tensor parallelism splits. Of others, each rank
    adds its share to the sum of results: they are biases of results."""

    exchange: Exchange | None = None
    """Set by expert parallelism. None: this rank has all experts."""

    @abstractmethod
    def forward(self, x_ND: Tensor, weights_NK: Tensor, chosen_NK: Tensor) -> Tensor:
        """Return the sum of the chosen experts' results for each token, times their weights: (N, D)."""

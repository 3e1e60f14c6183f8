"""`StackedExperts`: what expert parallelism needs to know of a layer's routed experts."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

Exchange = Callable[[Tensor, Tensor, Tensor, Callable[..., Tensor]], Tensor]
"""(rows_RD, weight_R, counts_E, compute) → (R, D): the results of the ranks that have the experts. Rows are tokens in
the order of their experts, with `counts_E` rows for each; `compute`: as `forward`, for the experts of this rank."""


class StackedExperts(nn.Module):
    """Base class of routed experts, whose parameters have the experts as dimension 0."""

    device_type: str | None = None
    """Device whose algorithm is used. None: the tokens' device."""

    matrices: Collection[str] = ()
    """Parameters (experts, …, outputs, inputs) that `product` multiplies with rows."""

    hidden_dims: Mapping[str, int | None] = {}
    """Parameter → its dimension over the experts' width, which expert tensor parallelism splits; None: ranks have it
    whole. Of others, each rank adds its share to the sum of results: they are biases of results."""

    exchange: Exchange | None = None
    """Set by expert parallelism. None: this rank has all experts."""

    width_group: ProcessGroup | None = None
    """Ranks with the other parts of the width, set by expert tensor parallelism."""

    def product(self, rows_RI: Tensor, name: str, ends_E: Tensor) -> Tensor:
        """Return the products of rows, in the order of experts, with the matrices `name` of their experts: (R, inputs)
        → (R, outputs). `ends_E`: end of each expert's rows, int32."""
        return F.grouped_mm(rows_RI, getattr(self, name).flatten(1, -2).mT, offs=ends_E)

    @abstractmethod
    def forward(self, x_ND: Tensor, weights_NK: Tensor, chosen_NK: Tensor) -> Tensor:
        """Return the sum of the chosen experts' results for each token, times their weights: (N, D)."""

"""Feed-forward networks of blocks: gated (SwiGLU, GeGLU), or plain with one activation."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.protocols.initializer import Constant, TruncatedNormal, with_initializers

Activation = Callable[[Tensor], Tensor]


class InitStds(TypedDict):
    """Standard deviations of the initial input and output projections of a layer."""

    init_std: float
    out_init_std: float


class LayerSizes(InitStds):
    """Arguments that the networks of a layer share, besides their inner width."""

    dim: int


gelu_tanh: Activation = partial(F.gelu, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """Return `relu(x) ** 2` (Primer, arXiv:2109.08668)."""
    return F.relu(x).square()


def make_linear(n_in: int, n_out: int, init_std: float, *, bias: bool = False) -> nn.Linear:
    """Return a linear layer with initial values: weights normal, biases 0."""
    biases = {"bias": Constant(0.0)} if bias else {}
    return with_initializers(
        nn.Linear(n_in, n_out, bias=bias), weight=TruncatedNormal(init_std), **biases
    )


class GatedFeedForward(nn.Module):
    """`w2(activation(w1 x) * w3 x)` (Shazeer 2020, arXiv:2002.05202): SwiGLU with `F.silu`, GeGLU
    with `F.gelu` or `gelu_tanh`. `init_std`: of `w1`; `out_init_std`: of `w2`, `w3`."""

    def __init__(
        self,
        *,
        dim: int,
        hidden_dim: int,
        activation: Activation = F.silu,
        bias: bool = False,
        init_std: float,
        out_init_std: float,
    ):
        super().__init__()
        self.activation = activation
        self.w1 = make_linear(dim, hidden_dim, init_std, bias=bias)
        self.w2 = make_linear(hidden_dim, dim, out_init_std, bias=bias)
        self.w3: nn.Linear | None = make_linear(dim, hidden_dim, out_init_std, bias=bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        assert self.w3 is not None
        return self.w2(self.activation(self.w1(x_BLD)) * self.w3(x_BLD))


class FeedForward(GatedFeedForward):
    """`w2(activation(w1 x))`, the plain network of GPT and StarCoder. `w3` is None, for the plan of
    gated networks."""

    def __init__(self, *, activation: Activation = gelu_tanh, bias: bool = True, **sizes: Any):
        super().__init__(activation=activation, bias=bias, **sizes)
        self.w3 = None

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        return self.w2(self.activation(self.w1(x_BLD)))

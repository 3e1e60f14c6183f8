"""Normalization over the last dimension, with initial values."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.protocols.initializer import Constant, with_initializers

NormFactory = Callable[[int], nn.Module]
"""Make a norm of a width."""


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` (Zhang and Sennrich 2019, arXiv:1910.07467); weights start at `init`."""

    def __init__(self, dim: int, eps: float, *, init: float = 1.0):
        super().__init__(dim, eps=eps)
        with_initializers(self, weight=Constant(init))


class OffsetRMSNorm(nn.Module):
    """RMSNorm times `1 + weight`, in float32, as in Gemma; weights start at 0, so that weight decay
    pulls to 1."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        with_initializers(self, weight=Constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        """(…, dim) → (…, dim)."""
        scale = 1 + self.weight.float()
        return F.rms_norm(x.float(), self.weight.shape, scale, self.eps).type_as(x)


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` (Ba et al. 2016, arXiv:1607.06450), with or without bias; weights start
    at 1."""

    def __init__(self, dim: int, eps: float, *, bias: bool = True):
        super().__init__(dim, eps=eps, bias=bias)
        with_initializers(self, weight=Constant(1.0), **({"bias": Constant(0.0)} if bias else {}))

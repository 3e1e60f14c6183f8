"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import torch
from torch import Tensor, nn

from torchtitan.protocols.initializer import Constant, with_initializers


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension, starting as the identity scale.

    Under autocast the result comes in the lower precision: all that follows a norm are matrix products, and each of
    them would otherwise make, and keep for its backward pass, a converted copy of its own.
    """

    def __init__(self, dim: int, eps: float):
        super().__init__(dim, eps=eps)
        with_initializers(self, weight=Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) → (..., dim)."""
        out = super().forward(x)
        device_type = x.device.type
        return out.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else out

"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from torch import nn

from torchtitan.protocols.initializer import Constant, with_initializers


def rms_norm(dim: int, eps: float) -> nn.RMSNorm:
    """`torch.nn.RMSNorm` over the last dimension, starting as the identity scale."""
    return with_initializers(nn.RMSNorm(dim, eps=eps), weight=Constant(1.0))

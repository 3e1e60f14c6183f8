"""Layers of a block other than attention: root-mean-square normalization and the gated feed-forward network."""

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.protocols.initializer import Constant, TruncatedNormal, with_initializers


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` (Zhang and Sennrich 2019, arXiv:1910.07467) over the last dimension; weights start at 1."""

    def __init__(self, dim: int, eps: float):
        super().__init__(dim, eps=eps)
        with_initializers(self, weight=Constant(1.0))


class SwiGLU(nn.Module):
    """`w2(silu(w1 x) * w3 x)` (Shazeer 2020, arXiv:2002.05202). `init_std`: of `w1`; `out_init_std`: of `w2`, `w3`."""

    def __init__(self, *, dim: int, hidden_dim: int, init_std: float, out_init_std: float):
        super().__init__()
        out_init = TruncatedNormal(out_init_std)
        self.w1 = with_initializers(nn.Linear(dim, hidden_dim, bias=False), weight=TruncatedNormal(init_std))
        self.w2 = with_initializers(nn.Linear(hidden_dim, dim, bias=False), weight=out_init)
        self.w3 = with_initializers(nn.Linear(dim, hidden_dim, bias=False), weight=out_init)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        return self.w2(F.silu(self.w1(x_BLD)) * self.w3(x_BLD))

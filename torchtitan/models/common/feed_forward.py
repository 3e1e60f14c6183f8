"""The gated feed-forward network SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.protocols.initializer import TruncatedNormal, with_initializers


class SwiGLU(nn.Module):
    """`w2(silu(w1 x) * w3 x)`.

    Args:
        init_std: standard deviation of the initial gate `w1`.
        out_init_std: standard deviation of the initial `w2` and `w3`.
    """

    def __init__(self, *, dim: int, hidden_dim: int, init_std: float, out_init_std: float):
        super().__init__()
        out_init = TruncatedNormal(out_init_std)
        self.w1 = with_initializers(nn.Linear(dim, hidden_dim, bias=False), weight=TruncatedNormal(init_std))
        self.w2 = with_initializers(nn.Linear(hidden_dim, dim, bias=False), weight=out_init)
        self.w3 = with_initializers(nn.Linear(dim, hidden_dim, bias=False), weight=out_init)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        return self.w2(F.silu(self.w1(x_BLD)) * self.w3(x_BLD))

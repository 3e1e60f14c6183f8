"""Chunks of tokens in which linear recurrences with a decay per token and head are computed."""

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64
"""Tokens per chunk: larger chunks need more operations, smaller ones more sequential steps."""


class Chunks:
    """Rows of tokens, cut into M chunks of T tokens, and the factors by which states decay between
    tokens, 0 between documents.

    Args:
        decay_BLH: logarithm of each token's factor.
        documents_BL: numbers of the tokens' documents, (B or 1, L); 0: the document before the
            first token.
    """

    def __init__(self, decay_BLH: Tensor, documents_BL: Tensor):
        self.length = decay_BLH.shape[1]
        # torch 2.13 does not compile the backward pass of a single chunk
        self.size = min(_CHUNK, (self.length + 1) // 2)
        self.padding = -self.length % self.size
        decay_BMHT = self.split(decay_BLH[..., None])[..., 0]
        last = documents_BL[:, -1:].expand(-1, self.padding)
        documents_BMT = torch.cat((documents_BL, last), dim=1).unflatten(1, (-1, self.size))
        before_BM = F.pad(documents_BMT[:, :-1, -1], (1, 0))
        continues_BM1T = (documents_BMT == before_BM[..., None])[:, :, None]
        sees_BM1TT = (documents_BMT[..., None] == documents_BMT[..., None, :]).tril()[:, :, None]
        # Sums of only the decays in between are more precise than differences of cumulative sums.
        later_TT = torch.ones(self.size, self.size, dtype=torch.bool, device=decay_BLH.device)
        later_TT = later_TT.tril(-1)
        self.between = (decay_BMHT[..., None] * later_TT).cumsum(-2).exp() * sees_BM1TT
        """From a token, in the last dimension, to each later one: (B, M, H, T, T)."""
        self.before = decay_BMHT.cumsum(-1).exp() * continues_BM1T
        """From the chunk before to each token: (B, M, H, T)."""

    @property
    def after(self) -> Tensor:
        """From each token to the chunk's last: (B, M, H, T)."""
        return self.between[..., -1, :]

    def split(self, x_BLHN: Tensor) -> Tensor:
        """(B, L, H, N) → (B, M, H, T, N), padded with zeros."""
        padded = F.pad(x_BLHN, (0, 0, 0, 0, 0, self.padding))
        return padded.unflatten(1, (-1, self.size)).transpose(2, 3)

    def join(self, x_BMHTN: Tensor) -> Tensor:
        """(B, M, H, T, N) → (B, L, H, N), without the padding."""
        return x_BMHTN.transpose(2, 3).flatten(1, 2)[:, : self.length]

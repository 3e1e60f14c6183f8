"""Chunks of tokens in which linear recurrences with a decay per token and head, or per token and
element of a head's keys, are computed.

Dimensions: M chunks of T tokens; X = 1 decay of a head, or one for each of the E elements of its
keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64
"""Tokens per chunk: larger chunks need more operations, smaller ones more sequential steps."""

_CHUNK_OF_ELEMENTS = 16
"""Tokens per chunk with a decay per element: each pair of tokens then has one factor per element of
a key."""


class Chunks:
    """Rows of tokens, cut into M chunks of T tokens, and the factors by which states decay between
    tokens, 0 between documents.

    Args:
        decay_BLHX: logarithm of each token's factors.
        documents_BL: numbers of the tokens' documents, (B or 1, L); 0: the document before the
            first token.
    """

    def __init__(self, decay_BLHX: Tensor, documents_BL: Tensor):
        self.length = decay_BLHX.shape[1]
        self.is_of_heads = decay_BLHX.shape[-1] == 1
        largest = _CHUNK if self.is_of_heads else _CHUNK_OF_ELEMENTS
        # torch 2.13 does not compile the backward pass of a single chunk
        self.size = min(largest, (self.length + 1) // 2)
        self.padding = -self.length % self.size
        decay_BMHTX = self.split(decay_BLHX)
        last = documents_BL[:, -1:].expand(-1, self.padding)
        documents_BMT = torch.cat((documents_BL, last), dim=1).unflatten(1, (-1, self.size))
        before_BM = F.pad(documents_BMT[:, :-1, -1], (1, 0))
        continues_BM1T1 = (documents_BMT == before_BM[..., None])[:, :, None, :, None]
        sees_BMTT = (documents_BMT[..., None] == documents_BMT[..., None, :]).tril()
        sees_BM1TT1 = sees_BMTT[:, :, None, :, :, None]
        # Sums of only the decays in between are more precise than differences of cumulative sums.
        later_TT = torch.ones(self.size, self.size, dtype=torch.bool, device=decay_BLHX.device)
        later_TT1 = later_TT.tril(-1)[..., None]
        self.between = (decay_BMHTX[..., None, :] * later_TT1).cumsum(-3).exp() * sees_BM1TT1
        """From a token, in the second to last dimension, to each later one: (B, M, H, T, T, X)."""
        self.before = decay_BMHTX.cumsum(-2).exp() * continues_BM1T1
        """From the chunk before to each token: (B, M, H, T, X)."""

    @property
    def after(self) -> Tensor:
        """From each token to the chunk's last: (B, M, H, T, X)."""
        return self.between[..., -1, :, :]

    def products(self, k_BMHTE: Tensor, *others_BMHTE: Tensor) -> list[Tensor]:
        """Return the products of each of `others_BMHTE` with the keys of earlier tokens, decayed
        since then: (B, M, H, T, T)."""
        if self.is_of_heads:
            return [other @ k_BMHTE.mT * self.between[..., 0] for other in others_BMHTE]
        decayed_BMHTTE = k_BMHTE[..., None, :, :] * self.between
        stacked = decayed_BMHTTE @ torch.stack(others_BMHTE, dim=-1)
        return list(stacked.unbind(-1))

    def split(self, x_BLHN: Tensor) -> Tensor:
        """(B, L, H, N) → (B, M, H, T, N), padded with zeros."""
        padded = F.pad(x_BLHN, (0, 0, 0, 0, 0, self.padding))
        return padded.unflatten(1, (-1, self.size)).transpose(2, 3)

    def join(self, x_BMHTN: Tensor) -> Tensor:
        """(B, M, H, T, N) → (B, L, H, N), without the padding."""
        return x_BMHTN.transpose(2, 3).flatten(1, 2)[:, : self.length]

"""Convolutions over time that do not reach across documents.

Dimensions: J channels; W earlier tokens that a token sees; S = W + L tokens with these.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.protocols.initializer import Uniform, with_initializers
from torchtitan.protocols.recurrence import OwnHeads
from torchtitan.protocols.sharding import with_features


class DocumentConv(OwnHeads):
    """Causal convolution of each channel within its document. The weights are a `Conv1d`'s, and
    start like them. `is_shared`: all heads use all channels."""

    def __init__(self, channels: int, width: int, *, bias: bool = False, is_shared: bool = False):
        super().__init__()
        self.is_shared = is_shared
        self.weight = nn.Parameter(torch.zeros(channels, 1, width))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        values = Uniform(-(width**-0.5), width**-0.5)
        with_initializers(self, weight=values, bias=values)
        with_features(self, weight=("out", None, None), bias=("out",))

    def forward(
        self, x_BLJ: Tensor, documents_BL: Tensor, earlier_BWJ: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the result and the last inputs, (B, width - 1, J), to pass as `earlier_BWJ` with
        the next tokens. None: no earlier tokens."""
        (batch, length, channels), n_earlier = x_BLJ.shape, self.weight.shape[-1] - 1
        if earlier_BWJ is None:
            earlier_BWJ = x_BLJ.new_zeros(batch, n_earlier, channels)
        x_BSJ = torch.cat((earlier_BWJ, x_BLJ), dim=1)
        documents_BS = F.pad(documents_BL, (n_earlier, 0))
        out_BLJ = torch.zeros_like(x_BLJ)
        for start, weight_J in enumerate(self.own(self.weight)[:, 0].unbind(-1)):
            is_same_BL = documents_BS[:, start : start + length] == documents_BL
            # In this order, the backward pass needs no masked copies of the inputs.
            out_BLJ = out_BLJ + is_same_BL[..., None] * (
                weight_J * x_BSJ[:, start : start + length]
            )
        if self.bias is not None:
            out_BLJ = out_BLJ + self.own(self.bias)
        is_last_BW = documents_BS[:, length:] == documents_BL[:, -1:]
        return out_BLJ, x_BSJ[:, length:] * is_last_BW[..., None]

"""The gated short convolution of LFM2 (Liquid AI, arXiv:2511.23404)."""

from typing import Any

import torch
from torch import Tensor

from torchtitan.models.common.document_conv import DocumentConv
from torchtitan.models.common.feed_forward import make_linear
from torchtitan.models.common.hugging_face import module_rows
from torchtitan.models.common.mixers import MixerKind
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.recurrence import Recurrence
from torchtitan.protocols.state_dict_adapter import Concatenated, KeyMapping


class GatedShortConv(Recurrence):
    """`out(c * conv(b * x))`: three projections of each token, b, c and x, and a causal convolution
    of a few tokens within documents.

    Args:
        width: tokens that the convolution sees, including the current one.
        bias: the projections and the convolution have biases.
        init_std: standard deviation of the initial input projections.
        out_init_std: standard deviation of the initial output projection.
    """

    def __init__(self, *, dim: int, width: int, bias: bool, init_std: float, out_init_std: float):
        super().__init__()
        self.in_b, self.in_c, self.in_x = (
            make_linear(dim, dim, init_std, bias=bias) for _ in range(3)
        )
        self.conv = DocumentConv(dim, width, bias=bias)
        self.out = make_linear(dim, dim, out_init_std, bias=bias)

    def project(self, x_BLD: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the convolution, (B, L, dim)."""
        return (self.in_b(x_BLD) * self.in_x(x_BLD),)

    def recur(
        self, *inputs: Tensor, documents_BL: Tensor, state: object, attention: AttentionMetadata
    ) -> tuple[Tensor, object]:
        """Return the convolution, and its last inputs."""
        (x_BLJ,) = inputs
        precise = torch.promote_types(x_BLJ.dtype, torch.float32)
        out_BLJ, state = self.conv(x_BLJ.to(precise), documents_BL, state)
        return out_BLJ.to(x_BLJ.dtype), state

    def finish(self, out_BLJ: Tensor, x_BLD: Tensor) -> Tensor:
        """Gate the convolution, and project it."""
        return self.out(self.in_c(x_BLD) * out_BLJ)


def _short_conv(decoder: Any, index: int) -> GatedShortConv:
    config = decoder.config
    return GatedShortConv(
        dim=config.dim,
        width=config.conv_width,
        bias=config.conv_bias,
        **decoder.init_stds(index),
    )


SHORT_CONV = MixerKind(
    make=_short_conv,
    score_flops=lambda decoder, index, seq_len: 0,  # a few weights per channel
    tensor={
        **{f"in_{name}": "columns" for name in "bcx"},
        "conv": "own channels",
        "out": "rows",
    },
    heads=("dim",),
)

SHORT_CONV_ROWS = (
    *(
        KeyMapping(
            tuple(f"layers.*.attention.in_{name}.{kind}" for name in "bcx"),
            f"model.layers.*.conv.in_proj.{kind}",
            Concatenated(0),
        )
        for kind in ("weight", "bias")
    ),
    *module_rows("layers.*.attention", "model.layers.*.conv", {"conv": "conv", "out": "out_proj"}),
)
"""Names of the weights of gated short convolutions."""

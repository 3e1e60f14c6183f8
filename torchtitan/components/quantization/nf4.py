"""NF4: weights in 4 bits with double-quantized scales (QLoRA, arXiv:2305.14314, section 3).

A weight (out, in) becomes three plain tensors, each row depending only on itself:

- `packed` (out, in / 2): two indices into the 16 `LEVELS` per byte, the first in the upper four
  bits;
- `scales` (out, in / 64): for each block of 64 values of a row, its scale in 8 bits;
- `scale_ranges` (out, 8): offset and step of the row's scales, two float32 numbers as their bytes.

A value is `LEVELS[index] * scale` with `scale = offset + step * scales`, rounded to bfloat16, as
one form of `components.weights.few_bits`. Memory per weight: 1/2 + 1/64 + 8/in bytes.

torchao's `NF4Tensor` (0.18) quantizes scales in groups of 256 that run across rows: each shard must
be a multiple of 16,384 values (64 x 64 is rejected), values depend on the sharding, tensor
parallelism is not supported, and `to_empty` loses it. Rows of plain tensors are sharded, saved,
initialized and read like the rows of any weight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan.components.weights import few_bits
from torchtitan.components.weights.few_bits import NF4_LEVELS as LEVELS
from torchtitan.components.weights.few_bits import FewBits, row_chunks

BLOCK_SIZE = 64
"""Number of neighboring values of a row that share a scale."""

FORM = FewBits("nf4", BLOCK_SIZE, "linear", "bfloat16")
"""Form in which these weights are stored."""

_LARGEST_CODE = 255
_MIDPOINTS = torch.tensor(
    [(a + b) / 2 for a, b in zip(LEVELS[:-1], LEVELS[1:], strict=True)], device="cpu"
)


class NF4(NamedTuple):
    """A weight, or n of its rows, in 4 bits."""

    packed: Tensor
    """(…, in / 2) uint8."""
    scales: Tensor
    """(…, in / 64) uint8."""
    scale_ranges: Tensor
    """(…, 8) uint8."""


@torch.no_grad()
def pack(rows: Tensor) -> NF4:
    """Quantize rows (…, in) to 4 bits, with `in` divisible by `BLOCK_SIZE`, each row independently.
    A block's scale is its largest absolute value, rounded to the nearest of 256 steps between the
    smallest and largest of the row; a value becomes the nearest level at that scale."""
    width = rows.shape[-1]
    assert width % BLOCK_SIZE == 0, f"rows of {width} values are not whole blocks"
    shapes = [FORM.part_shape(part, rows.shape) for part in FORM.parts]
    result = NF4(*(rows.new_empty(shape, dtype=torch.uint8) for shape in shapes))
    if rows.is_meta:  # there is nothing to compute, and a large model has many chunks
        return result
    flat = rows.flatten(0, -2)
    parts = [part.flatten(0, -2) for part in result]
    for chunk in row_chunks(len(flat), width):
        for whole, part in zip(parts, _pack(flat[chunk].float()), strict=True):
            whole[chunk] = part
    return result


def unpack(packed: Tensor, scales: Tensor, scale_ranges: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows (n, in) of the three tensors of `pack` in `dtype`: computed in float32,
    rounded to bfloat16."""
    return few_bits.unpack(FORM, (packed, scales, scale_ranges), dtype)


def _pack(rows: Tensor) -> NF4:
    blocks = rows.unflatten(1, (-1, BLOCK_SIZE))
    largest = blocks.abs().amax(-1)
    offset, top = largest.amin(1, keepdim=True), largest.amax(1, keepdim=True)
    step = (top - offset) / _LARGEST_CODE
    codes = ((largest - offset) / _or_one(step)).round().to(torch.uint8)
    ranges = torch.cat([offset, step], dim=1).view(torch.uint8)
    # Divide by the rounded scale, which `unpack` multiplies with.
    relative = blocks / _or_one(_decode(codes, ranges))[..., None]
    indices = torch.bucketize(relative, _MIDPOINTS.to(rows.device), out_int32=True).to(torch.uint8)
    first, second = indices.view(rows.shape[0], -1, 2).unbind(-1)
    return NF4(first << 4 | second, codes, ranges)


def _decode(codes: Tensor, ranges: Tensor) -> Tensor:
    """Return the scales of the blocks, (n, in / 64) in float32."""
    offset, step = ranges.view(torch.float32).split(1, dim=1)
    return offset + step * codes


def _or_one(divisors: Tensor) -> Tensor:
    """Replace 0 with 1, since the scale of a row or block of zeros is 0."""
    return torch.where(divisors == 0, 1.0, divisors)

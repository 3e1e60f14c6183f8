"""NF4: weights in 4 bits with double-quantized scales (QLoRA, arXiv:2305.14314, section 3), and
products with them.

A weight (out, in) becomes three plain tensors, each row depending only on itself:

- `packed` (out, in / 2): two indices into the 16 `LEVELS` per byte, the first in the upper four
  bits;
- `scales` (out, in / 64): for each block of 64 values of a row, its scale in 8 bits;
- `scale_ranges` (out, 8): offset and step of the row's scales, two float32 numbers as their bytes.

A value is `LEVELS[index] * scale` with `scale = offset + step * scales`, rounded to bfloat16, so
that it is the same in any compute type. All three are uint8, which mixed precision does not cast.
Memory per weight: 1/2 + 1/64 + 8/in bytes.

torchao's `NF4Tensor` (0.18) quantizes scales in groups of 256 that run across rows: each shard must
be a multiple of 16,384 values (64 x 64 is rejected), values depend on the sharding, tensor
parallelism is not supported, and `to_empty` loses it. Rows of plain tensors are sharded, saved,
initialized and read like the rows of any weight.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.tools.sharded import is_dtensor

BLOCK_SIZE = 64
"""Number of neighboring values of a row that share a scale."""

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Values of the indices: quantiles of the normal distribution, scaled to [-1, 1], with an exact 0
(appendix E)."""

_CHUNK_VALUES = 2**23
"""Number of values packed or unpacked at a time; temporaries take about 10 bytes per value."""

_LARGEST_CODE = 255
_MIDPOINTS = torch.tensor(
    [(a + b) / 2 for a, b in zip(LEVELS[:-1], LEVELS[1:], strict=True)], device="cpu"
)
_PAIRS = torch.tensor([(first, second) for first in LEVELS for second in LEVELS], device="cpu")
"""Byte → its two values."""


class NF4(NamedTuple):
    """A weight, or n of its rows, in 4 bits."""

    packed: Tensor
    """(n, in / 2) uint8."""
    scales: Tensor
    """(n, in / 64) uint8."""
    scale_ranges: Tensor
    """(n, 8) uint8."""


@torch.no_grad()
def pack(rows: Tensor) -> NF4:
    """Quantize rows (n, in) to 4 bits, with `in` divisible by `BLOCK_SIZE`, each row independently.
    A block's scale is its largest absolute value, rounded to the nearest of 256 steps between the
    smallest and largest of the row; a value becomes the nearest level at that scale."""
    n, width = rows.shape
    assert width % BLOCK_SIZE == 0, f"rows of {width} values are not whole blocks"
    bytes_per_row = (width // 2, width // BLOCK_SIZE, 2 * torch.float32.itemsize)
    result = NF4(*(rows.new_empty((n, size), dtype=torch.uint8) for size in bytes_per_row))
    if rows.is_meta:  # there is nothing to compute, and a large model has many chunks
        return result
    for chunk in _chunks(n, width):
        for whole, part in zip(result, _pack(rows[chunk].float()), strict=True):
            whole[chunk] = part
    return result


def unpack(packed: Tensor, scales: Tensor, scale_ranges: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows (n, in) of the three tensors of `pack` in `dtype`: computed in float32,
    rounded to bfloat16."""
    pairs = _PAIRS.to(packed.device, non_blocking=True)
    if torch.compiler.is_compiling():  # fuses the operations without temporaries
        return _unpack(packed, scales, scale_ranges, pairs).to(dtype)
    n, width = packed.shape[0], 2 * packed.shape[1]
    rows = packed.new_empty((n, width), dtype=torch.bfloat16)
    for chunk in _chunks(n, width):
        rows[chunk] = _unpack(packed[chunk], scales[chunk], scale_ranges[chunk], pairs)
    return rows.to(dtype)


def _unpack(packed: Tensor, scales: Tensor, scale_ranges: Tensor, pairs: Tensor) -> Tensor:
    levels = F.embedding(packed.int(), pairs).view(packed.shape[0], -1, BLOCK_SIZE)
    return (levels * _decode(scales, scale_ranges)[..., None]).flatten(1).bfloat16()


@functools.cache
def compiled_unpack() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return `_unpack` as one kernel for any size. Checkpointing policies do not see it, so that
    they never keep its result."""
    return torch.compile(_unpack, dynamic=True, options={"wrap_inductor_compiled_regions": False})


def _unpack_for_product(
    packed: Tensor, scales: Tensor, scale_ranges: Tensor, dtype: torch.dtype
) -> Tensor:
    if packed.is_cuda and not torch.compiler.is_compiling():
        return compiled_unpack()(
            packed, scales, scale_ranges, _PAIRS.to(packed.device, non_blocking=True)
        ).to(dtype)
    return unpack(packed, scales, scale_ranges, dtype)


def unpack_weight(
    packed: Tensor, scales: Tensor, scale_ranges: Tensor, dtype: torch.dtype
) -> Tensor:
    """Unpack a weight; under tensor parallelism, each rank unpacks its shard."""
    if not is_dtensor(packed):
        return unpack(packed, scales, scale_ranges, dtype)
    from torch.distributed.tensor import DTensor

    assert is_dtensor(scales) and is_dtensor(scale_ranges)
    local = unpack(packed.to_local(), scales.to_local(), scale_ranges.to_local(), dtype)
    shape = torch.Size((packed.shape[0], 2 * packed.shape[1]))
    return DTensor.from_local(
        local,
        packed.device_mesh,
        packed.placements,
        run_check=False,
        shape=shape,
        stride=(shape[1], 1),
    )


def quantized_linear(x: Tensor, packed: Tensor, scales: Tensor, scale_ranges: Tensor) -> Tensor:
    """Return `x (…, in)` times the transpose of a 4-bit weight, (…, out), with a gradient for `x`.
    The weight is unpacked for the product and again in the backward pass. Under tensor parallelism,
    it is sharded by outputs or inputs, and each rank multiplies its shard."""
    if not is_dtensor(packed):
        return _multiply(x, packed, scales, scale_ranges)
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    assert is_dtensor(x) and is_dtensor(scales) and is_dtensor(scale_ranges)
    is_colwise = packed.placements == (Shard(0),)
    last = Shard(x.ndim - 1)
    assert x.placements == ((Replicate(),) if is_colwise else (last,)), (
        f"{x.placements} times {packed.placements}"
    )
    local_x = x.to_local(grad_placements=[Partial() if is_colwise else last])
    local_y = _multiply(local_x, packed.to_local(), scales.to_local(), scale_ranges.to_local())
    return DTensor.from_local(
        local_y, packed.device_mesh, [last if is_colwise else Partial()], run_check=False
    )


def _multiply(x: Tensor, *weight: Tensor) -> Tensor:
    y: Tensor = _QuantizedLinear.apply(x, *weight)
    return y


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, scale_ranges: Tensor
    ) -> Tensor:
        ctx.save_for_backward(packed, scales, scale_ranges)
        return F.linear(x, _unpack_for_product(packed, scales, scale_ranges, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        packed, scales, scale_ranges = ctx.saved_tensors
        if torch.compiler.is_compiling():
            packed = _copy_after(packed, gradient)
        return (
            gradient @ _unpack_for_product(packed, scales, scale_ranges, gradient.dtype),
            None,
            None,
            None,
        )


@torch.library.custom_op("torchtitan::copy_after", mutates_args=())
def _copy_after(tensor: Tensor, earlier: Tensor) -> Tensor:
    """Return a copy of `tensor` that depends on `earlier`. Otherwise, the compiler would unpack a
    weight only once, in the forward pass, and keep it for the backward pass."""
    return tensor.clone()


@_copy_after.register_fake
def _(tensor: Tensor, earlier: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def _chunks(n_rows: int, width: int) -> Iterator[slice]:
    size = max(1, _CHUNK_VALUES // width)
    for first in range(0, n_rows, size):
        yield slice(first, min(first + size, n_rows))


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

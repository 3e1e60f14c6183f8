"""Formats of narrow numbers with a scale for each block of neighbors.

MXFP8 (OCP Microscaling Formats 1.0): blocks of 32 E4M3 numbers with a power of 2 (E8M0) as scale.
NVFP4 (NVIDIA, arXiv:2509.25149, appendix C): blocks of 16 E2M1 numbers with an E4M3 number as
scale, and a float32 scale for the whole tensor.
Float8 by rows (torchao's recipe "rowwise"): a row of E4M3 numbers with a power of 2 as scale.

All are emulated: elements and scales are float32 tensors with values of the narrow type.
"""

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.components.weights.few_bits import TABLES

MXFP8_BLOCK = 32
NVFP4_BLOCK = 16

_E4M3_LARGEST = 448.0
_E4M3_SMALLEST_NORMAL = 2.0**-6
_E2M1_LARGEST = 6.0
_SMALLEST_ROW = 1e-12
_E8M0_EXPONENTS = (-127, 127)

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, 1, -1)
"""Random signs of the Hadamard transform, the same in all layers and steps (arXiv:2509.25149,
section 4.2)."""


class Blocks(NamedTuple):
    """A tensor in a block format: value = element · scale of the block · scale of the tensor."""

    elements: Tensor
    """(…, n) float32."""
    scales: Tensor
    """(…, n / block) float32."""
    tensor_scale: Tensor
    """() float32."""

    def operand(self) -> Tensor:
        """Return elements times scales of blocks, (…, n) in float32, without rounding; a product
        multiplies its sum with `tensor_scale`."""
        blocks = self.elements.unflatten(-1, (self.scales.shape[-1], -1))
        return (blocks * self.scales[..., None]).flatten(-2)

    def values(self) -> Tensor:
        """Return the values, (…, n) in float32."""
        return self.operand() * self.tensor_scale


def mxfp8(x: Tensor) -> Blocks:
    """Cast (…, n) to MXFP8, with n divisible by 32.

    The scale of a block is the smallest power of 2 that is at least max / 448, computed in float32
    (torchao's RCEIL, the rule of NVIDIA's conversion instruction); it stays in E8M0, 2⁻¹²⁷ to 2¹²⁷.
    Elements are rounded half to even and limited to 448. A block with an infinity keeps it, at
    the largest scale; a block with NaN becomes NaN.
    """
    blocks = x.float().unflatten(-1, (-1, MXFP8_BLOCK))
    largest = blocks.abs().amax(-1)
    exponents = mxfp8_exponents(largest)
    scales = torch.ldexp(torch.where(largest.isnan(), largest, 1.0), exponents)
    scaled = times_power_of_2(blocks, -exponents[..., None])
    elements = _to_e4m3(torch.where(largest.isnan()[..., None], torch.nan, scaled))
    return Blocks(elements.flatten(-2), scales, scales.new_ones(()))


def mxfp8_exponents(largest: Tensor) -> Tensor:
    """Return the exponents, int32, of the scales of blocks with these largest absolute values,
    float32; of a block with NaN, any."""
    # mantissa in [0.5, 1), so that ceil(log2) is exact
    mantissa, exponents = torch.frexp(largest / _E4M3_LARGEST)
    exponents = torch.where(mantissa == 0.5, exponents - 1, exponents).clamp(*_E8M0_EXPONENTS)
    # also of the smallest numbers, whose quotients are 0 in float32
    exponents = torch.where(mantissa == 0, _E8M0_EXPONENTS[0], exponents)
    return torch.where(largest.isinf(), _E8M0_EXPONENTS[1], exponents)


def times_power_of_2(x: Tensor, exponents: Tensor) -> Tensor:
    """Return `x · 2^exponents`, float32, exact unless the result is too small or large. In two
    steps, since float32 has no 2¹²⁷ times 2, nor its inverse as a normal number."""
    half = exponents // 2
    return torch.ldexp(torch.ldexp(x, half), exponents - half)


def float8_rows(x: Tensor) -> Blocks:
    """Cast (…, n) to float8 with one scale for each row: the smallest power of 2 that is at least
    max / 448 (torchao's "rowwise"), and at least 1e-12 / 448. Elements are rounded half to even. A
    row with an infinity or NaN becomes NaN."""
    largest = x.abs().amax(-1, keepdim=True).double().clamp(min=_SMALLEST_ROW)
    # rounded to float32 first, as in torchao; mantissa in [0.5, 1)
    mantissa, exponent = torch.frexp((_E4M3_LARGEST / largest).float())
    inverse = torch.ldexp(torch.ones_like(mantissa), exponent - 1)
    inverse = torch.where(mantissa.isfinite() & (mantissa > 0), inverse, torch.nan)
    return Blocks(_to_e4m3(x.float() * inverse), 1.0 / inverse, inverse.new_ones(()))


def nvfp4(
    x: Tensor,
    *,
    square_blocks: bool = False,
    stochastic: bool = False,
    group: ProcessGroup | None = None,
    peak: Tensor | None = None,
) -> Blocks:
    """Cast (…, n) to NVFP4, with n divisible by 16.

    The scale of the tensor is max / (448 · 6). The scale of a block is max / 6 over the scale of
    the tensor, rounded to E4M3, and at least 2⁻⁶ (as in torchao). Elements are limited to 6 and
    rounded half to even. Without a largest value, infinite or NaN, all values are NaN.

    Args:
        square_blocks: one scale for each 16 × 16 values of a matrix, so that its transpose has the
            same values.
        stochastic: round an element to one of its two neighbors, with the probabilities that make
            the expected value exact. The choices depend on nothing but the tensor, up to a power of
            2 (by which layouts scale gradients): equal tensors are rounded equally, in any process
            and at any time.
        group: ranks with other parts of the tensor. A collective.
        peak: the largest value of the tensor, if known, as `largest_of` returns it.
    """
    x = x.float()
    if peak is None:
        peak = largest_of(x)
        if group is not None:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    # a tensor, since PyTorch divides a number by multiplying with the rounded inverse
    largest_value = torch.full_like(peak, _E4M3_LARGEST * _E2M1_LARGEST)
    encode = largest_value / torch.where(peak == 0, 1.0, peak)
    encode = torch.where(peak == 0, 1.0, encode.clamp(max=torch.finfo(torch.float32).max))
    tensor_scale = torch.where(peak.isfinite(), 1.0 / encode, torch.nan)
    blocks = x.unflatten(-1, (-1, NVFP4_BLOCK))
    largest = blocks.abs().amax(-1)
    if square_blocks:
        squares = largest.unflatten(-2, (-1, NVFP4_BLOCK)).amax(-2)
        largest = squares.repeat_interleave(NVFP4_BLOCK, dim=-2)
    scales = _to_e4m3((largest / _E2M1_LARGEST * encode).clamp(min=_E4M3_SMALLEST_NORMAL))
    inverse = (1.0 / (scales * tensor_scale)).clamp(max=torch.finfo(torch.float32).max)
    scaled = (blocks * inverse[..., None]).flatten(-2)
    elements = _to_e2m1(scaled, uniform_of_bits(scaled) if stochastic else None)
    return Blocks(elements, scales, tensor_scale)


def largest_of(x: Tensor) -> Tensor:
    """Return the largest absolute value, () in float32; infinity if one is NaN, which a maximum
    over ranks may drop."""
    return x.abs().amax().float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def hadamard(x: Tensor) -> Tensor:
    """Multiply each 16 neighbors of (…, n) with random signs and an orthogonal Hadamard matrix,
    which spreads outliers over the block. The products of two transformed tensors over n are
    unchanged."""
    signs, matrix = (constant.to(x.device) for constant in _hadamard_constants())
    blocks = x.float().unflatten(-1, (-1, NVFP4_BLOCK))
    return ((blocks * signs) @ matrix).flatten(-2).to(x.dtype)


@functools.cache
def _hadamard_constants() -> tuple[Tensor, Tensor]:
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    matrix = functools.reduce(torch.kron, [pair] * 4)
    return torch.tensor(SIGNS, dtype=torch.float32), matrix / NVFP4_BLOCK**0.5


def pack_e2m1(elements: Tensor) -> Tensor:
    """Return numbers of E2M1 (…, n) as bytes (…, n / 2), the lower half first. NaN becomes 6: its
    tensor has no scale."""
    sizes = torch.bucketize(elements.abs(), _e2m1_numbers(elements.device)[:8]).clamp(max=7)
    codes = (sizes + 8 * elements.signbit()).to(torch.uint8).unflatten(-1, (-1, 2))
    return codes[..., 0] | (codes[..., 1] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the numbers (…, n) of bytes (…, n / 2), float32."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return _e2m1_numbers(packed.device)[codes.int()]


def _e2m1_numbers(device: torch.device) -> Tensor:
    return torch.tensor(TABLES["e2m1"], device=device)


def padded(x: Tensor, block: int) -> Tensor:
    """Pad the last dimension with zeros, which change no scale, to whole blocks."""
    return F.pad(x, (0, -x.shape[-1] % block))


def uniform_of_bits(x: Tensor) -> Tensor:
    """Return a number in [0, 1) for each element of a float32 tensor: a hash (SplitMix64, Steele et
    al. 2014) of its position, with the sum of the tensor's bits as key. Sums of integers do not
    depend on their order."""
    key = x.view(torch.int32).sum(dtype=torch.int64)
    places = torch.arange(x.numel(), device=x.device).view(x.shape)
    mixed = _mix(places + _mix(key))
    return (mixed & 0xFFFFFF).float() / 2**24


def _mix(z: Tensor) -> Tensor:
    z = z + -0x61C8864680B583EB
    z = (z ^ _shifted(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift to the right, as for integers without a sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn).float()


def _to_e2m1(x: Tensor, uniform: Tensor | None) -> Tensor:
    """Round to 0, 0.5, 1, 1.5, 2, 3, 4 or 6, with the sign: half to even, or up if the distance
    from the lower neighbor plus `uniform` is a whole step."""
    size = x.abs().clamp(max=_E2M1_LARGEST)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    steps = size / step
    whole = steps.round() if uniform is None else (steps + uniform).floor()
    return torch.copysign((whole * step).clamp(max=_E2M1_LARGEST), x)

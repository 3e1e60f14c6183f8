"""Casts to MXFP8 and NVFP4 against models of the formats in float64, written here from their
definitions, and against torchao's casts."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from torchtitan.components.quantization import block_formats
from torchtitan.components.quantization.block_formats import (
    Blocks,
    float8_rows,
    hadamard,
    mxfp8,
    nvfp4,
)

E4M3 = sorted(
    {m * 2.0**-9 for m in range(8)}
    | {
        (1 + m / 8) * 2.0**e
        for e in range(-6, 9)
        for m in range(8)
        if (e, m) != (8, 7)  # NaN
    }
)
"""All numbers of at least 0: 1 sign, 4 exponent and 3 mantissa bits, bias 7, no infinity."""

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest(value: float, numbers: list[float]) -> float:
    """Return the nearest number with the sign of `value`; of two, the one with an even mantissa,
    which is at an even place."""
    places = sorted(range(len(numbers)), key=lambda i: (abs(numbers[i] - abs(value)), i % 2))
    return float(np.copysign(numbers[places[0]], value))


def model_of_mxfp8(block: list[float]) -> tuple[list[float], float]:
    """Return the values and the scale of a block of 32 finite float32 numbers."""
    ratio = np.float32(max(map(abs, block))) / np.float32(448)
    scale = next(2.0**e for e in range(-127, 128) if 2.0**e >= ratio or e == 127)
    return [nearest(x / scale, E4M3) * scale for x in block], scale


def model_of_nvfp4(rows: np.ndarray) -> np.ndarray:
    """Return the values of a finite float32 matrix with blocks along its rows. Scales are computed
    in float32, as the recipe says."""
    f = np.float32
    peak = np.abs(rows).max()
    encode = f(1) if peak == 0 else min(f(448 * 6) / peak, np.finfo(f).max)
    tensor_scale = f(1) / encode
    result = np.zeros(rows.shape)
    for i, first in itertools.product(range(len(rows)), range(0, rows.shape[1], 16)):
        block = rows[i, first : first + 16]
        ratio = max(np.abs(block).max() / f(6) * encode, f(2**-6))
        scale = f(nearest(float(ratio), E4M3))
        inverse = min(f(1) / (scale * tensor_scale), np.finfo(f).max)
        for j, x in enumerate(block):
            element = nearest(float(x * inverse), E2M1)
            result[i, first + j] = element * float(scale) * float(tensor_scale)
    return result


def hostile(block: int) -> Tensor:
    """Return blocks, (n, block) float32, with ties, zeros, subnormal numbers, block maxima just
    below and above a power of 2 times 448 or 6, outliers, and the largest number."""
    generator = torch.Generator().manual_seed(0)

    def normal(*scales: float) -> list[Tensor]:
        return [torch.randn(block, generator=generator) * scale for scale in scales]

    largest = torch.finfo(torch.float32).max
    with_maximum = [
        torch.cat([torch.tensor([top * 2.0**power]), normal(2.0**power)[0][1:]])
        for top in (448, 447.99997, 448.00003, 6, 5.9999995, 6.0000005)
        for power in (0, -3, 5)
    ]
    ties = [
        torch.cat([torch.tensor([448.0]), torch.tensor([top / 2 + top / 32] * 8), rest[9:]])
        for top in (1.0, 0.25, 64.0, 2.0**-8)
        for rest in normal(1.0)
    ]
    places = torch.arange(block) % len(E2M1)
    halves = (torch.tensor(E2M1)[places] + torch.tensor([*E2M1[1:], 6.0])[places]) / 2
    one = torch.zeros(block)
    one[3] = -1e-3
    return torch.stack(
        [
            *normal(1.0, 1e-3, 1e4, 1e-20, 1e20, 1e-37, 1e-39, 2.0**-130, 1e-44),
            *with_maximum,
            *ties,
            halves,
            -halves * 2.0**-4,
            torch.zeros(block),
            -torch.zeros(block),
            one,
            torch.full((block,), largest),
            torch.full((block,), torch.finfo(torch.float32).smallest_normal),
        ]
    )


def test_mxfp8_matches_the_format_in_float64():
    blocks = hostile(32)
    cast = mxfp8(blocks)
    exact = cast.elements.double() * cast.scales.double()
    scales = cast.scales.flatten().tolist()
    for block, values, scale in zip(blocks.tolist(), exact.tolist(), scales, strict=True):
        assert (values, scale) == model_of_mxfp8(block)
    # one rounding error of at most half a step of E4M3, or of its smallest number
    bound = torch.maximum(blocks.abs().double() / 16, cast.scales.double() * 2.0**-10)
    assert ((exact - blocks).abs() <= bound).all()


def test_float8_rows_match_the_format_in_float64():
    blocks = hostile(32)
    cast = float8_rows(blocks)
    exact = cast.elements.double() * cast.scales.double()
    for row, values in zip(blocks.tolist(), exact.tolist(), strict=True):
        inverse = float(np.float32(448 / max(*map(abs, row), 1e-12)))
        scale = next(2.0**e for e in range(-130, 130) if 2.0**-e <= inverse)
        assert values == [nearest(x / scale, E4M3) * scale for x in row]
    blocks = blocks[:9]  # others may round to above the largest number of float32
    for bad in (torch.inf, torch.nan):
        blocks[3, 5] = bad
        rows = float8_rows(blocks).values()
        assert rows[3].isnan().all() and rows[:3].isfinite().all() and rows[4:].isfinite().all()


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e20, 1e-30])
def test_nvfp4_matches_the_format_in_float64(scale):
    rows = hostile(16)
    rows = torch.cat([rows[:-2], rows[:9] * 0, torch.randn(5, 16)])[:, :16] * scale
    rows = rows[rows.abs().amax(dim=1) < 1e30]
    for matrix in (rows, rows[-5:], rows[-12:-5] * 0):
        cast = nvfp4(matrix)
        exact = cast.elements.double() * cast.scales.double() * cast.tensor_scale.double()
        assert np.array_equal(exact.numpy(), model_of_nvfp4(matrix.numpy()))


def test_infinities_and_nan_stay_visible():
    """A saturated value would hide that training diverges."""
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = torch.randn(2, 64)
        x[0, 5] = bad
        values = mxfp8(x).values()
        assert torch.equal(values[0, 5], x[0, 5]) or (bad != bad and values[0, :32].isnan().all())
        assert values[1].isfinite().all() and values[0, 32:].isfinite().all()
        assert nvfp4(x).values().isnan().all()


def test_square_blocks_are_the_same_for_the_transpose():
    weight = torch.randn(48, 32) * torch.logspace(0, 3, 48)[:, None]
    square = nvfp4(weight, square_blocks=True)
    assert torch.equal(square.values(), nvfp4(weight.T, square_blocks=True).values().T)
    assert not torch.equal(nvfp4(weight).values(), nvfp4(weight.T).values().T)
    peaks = weight.view(3, 16, 2, 16).abs().amax(dim=(1, 3))
    one_row = nvfp4(peaks.repeat_interleave(16, dim=1))
    assert torch.equal(square.scales[::16], one_row.scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_match_torchao(dtype):
    """torchao computes the exponent of MXFP8 with a rounded logarithm, and cannot divide by 2⁻¹²⁷;
    its NVFP4 divides in another order. Both differ from the formats only for values next to a
    midpoint, of which random numbers have few (bfloat16 numbers more: 0.9 %)."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    torch.manual_seed(0)
    x = (torch.randn(64, 128) * torch.logspace(-6, 6, 64)[:, None]).to(dtype)
    theirs = MXTensor.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    assert torch.equal(mxfp8(x).values(), theirs.dequantize(torch.float32))
    x = (torch.randn(64, 128) * torch.logspace(0, 2, 64)[:, None]).to(dtype)
    scale = per_tensor_amax_to_scale(x.float().abs().amax())
    four = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)
    different = (nvfp4(x).values() - four).abs() > 1e-6 * four.abs()
    assert different.float().mean() < (1e-3 if dtype == torch.float32 else 0.02)


def test_stochastic_rounding_is_unbiased_and_repeatable():
    """The mean of n roundings differs from the value by at most 5 standard errors; one rounding
    errs by at most half a step, 0.25 to 1, with the scale of 6 as 1."""
    torch.manual_seed(0)
    block = torch.cat([torch.linspace(-6, 6, 15), torch.tensor([6.0])])
    n = 4000
    rows = block.repeat(n, 1)
    cast = nvfp4(rows, stochastic=True)
    values = cast.values()
    assert (values.mean(dim=0) - block).abs().max() <= 5 * 1.0 / n**0.5
    grid = torch.tensor([*E2M1, *(-x for x in E2M1)])
    lower = torch.stack([grid[grid <= x + 1e-6].max() for x in block])
    upper = torch.stack([grid[grid >= x - 1e-6].min() for x in block])
    assert ((values / cast.tensor_scale / cast.scales[:, :1] - lower) * 1e3).round().min() >= 0
    assert ((upper - values / cast.tensor_scale / cast.scales[:, :1]) * 1e3).round().min() >= 0
    assert torch.equal(values, nvfp4(rows.clone(), stochastic=True).values())
    # neighbors round independently: products of their errors cancel
    errors = values - block
    assert (errors[:, 1:-2] * errors[:, 2:-1]).mean(dim=0).abs().max() <= 5 * 1.0 / n**0.5
    assert torch.equal(4 * values, nvfp4(4 * rows, stochastic=True).values())
    rows[7, 3] *= 1 + 2**-20  # makes the choices others
    assert (nvfp4(rows, stochastic=True).values() - values).abs().max() > 0.4


def test_uniform_numbers_are_uniform():
    numbers = block_formats.uniform_of_bits(torch.randn(300, 256)).double().flatten()
    assert 0 <= numbers.min() and numbers.max() < 1
    n = numbers.numel()
    counts = torch.histc(numbers, bins=64, min=0, max=1)
    # chi-square with 63 degrees of freedom: mean 63, standard deviation 11
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 + 5 * 11
    assert abs(float((numbers[1:] * numbers[:-1]).mean()) - 0.25) < 5 * 0.3 / n**0.5


def test_hadamard_transforms_cancel_in_products():
    torch.manual_seed(0)
    a, b = torch.randn(8, 64).double().float(), torch.randn(5, 64)
    product = a.double() @ b.double().T
    transformed = hadamard(a).double() @ hadamard(b).double().T
    assert (transformed - product).abs().max() <= 1e-5 * product.abs().max()
    outlier = torch.zeros(1, 16)
    outlier[0, 7] = 16.0
    assert hadamard(outlier).abs().unique().tolist() == [4.0]
    from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_rht_matrix

    matrix = get_rht_matrix(block_formats.SIGNS, torch.device("cpu"), torch.float32, 16)
    assert torch.allclose(hadamard(torch.eye(16)), matrix, atol=1e-7)


def test_values_are_elements_times_scales():
    blocks = Blocks(torch.ones(2, 32), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor(0.5))
    assert blocks.values()[:, ::16].tolist() == [[0.5, 1.0], [1.5, 2.0]]

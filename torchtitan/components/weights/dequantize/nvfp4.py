"""Weights in FP4 whose scales have a scale of their own, and packed MXFP4 of compressed-tensors.

In NVFP4, 16 values of a row share a scale in FP8 (E4M3), and all scales of a weight a factor:
`weight_scale_2` of ModelOpt multiplies, `weight_global_scale` of compressed-tensors divides. In
MXFP4, 32 values share a power of two (uint8, its exponent plus 127). Values are computed in float32
and rounded to bfloat16.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.components.weights.dequantize.scaled import fp4_codes, unpack_fp4
from torchtitan.components.weights.dequantize.weight import QuantizedWeight, read_part
from torchtitan.components.weights.few_bits import FewBits, kept_group
from torchtitan.protocols.tensor_source import TensorSource, TensorSpec
from torchtitan.tools.errors import UserError

_FACTORS = {"weight_scale_2": False, "weight_global_scale": True}
"""Name of a weight's factor, and whether it divides."""


@dataclass
class _FP4Weight(QuantizedWeight):
    values: str
    scale: str
    shape: torch.Size
    factor: str
    """Name of the factor of the scales; empty: none."""

    def __post_init__(self) -> None:
        self.spec = TensorSpec(self.shape, torch.bfloat16)
        self.stored = tuple(filter(None, (self.values, self.scale, self.factor)))

    @property
    def kept(self) -> FewBits | str:
        width = self.shape[-1]
        if not self.factor:
            return FewBits("e2m1", kept_group(32, width), "e8m0", "bfloat16")
        scales = "e4m3 over" if _FACTORS[self.factor.rpartition(".")[2]] else "e4m3 times"
        return FewBits("e2m1", kept_group(16, width), scales, "bfloat16")

    def part(self, source: TensorSource, items: slice, part: str) -> Tensor:
        codes = fp4_codes(read_part(source, self.values, items)).flatten(-2)
        if part == "packed":
            return codes
        if part == "scale_ranges":
            factor = source.read(self.factor).float().reshape(())
            return torch.stack((torch.zeros(()), factor)).view(torch.int64).expand(codes.shape)
        scale = read_part(source, self.scale, items).view(torch.uint8)
        return scale.repeat_interleave(codes.shape[-1] // scale.shape[-1], -1)

    def read(self, source: TensorSource, items: slice) -> Tensor:
        values = unpack_fp4(read_part(source, self.values, items)).flatten(-2)
        stored = read_part(source, self.scale, items)
        if stored.dtype == torch.uint8:
            stored = stored.view(torch.float8_e8m0fnu)
        scale = stored.float()
        if self.factor:
            factor = source.read(self.factor).float().reshape(())
            divides = _FACTORS[self.factor.rpartition(".")[2]]
            scale = scale / factor if divides else scale * factor
        steps = values.shape[-1] // scale.shape[-1]
        return (values.unflatten(-1, (-1, steps)) * scale[..., None]).flatten(-2).bfloat16()


def fp4_weight(specs: Mapping[str, TensorSpec], values: str) -> QuantizedWeight:
    """Return the weight with the bytes `values`. Raise `UserError` if its scales are missing or
    wrong."""
    layer = values.rpartition(".")[0]
    scale = f"{layer}.weight_scale"
    if scale not in specs:
        raise UserError(f"{values} is quantized, but its scale {scale} is missing")
    factor = next((f"{layer}.{name}" for name in _FACTORS if f"{layer}.{name}" in specs), "")
    per_scale, dtypes = (
        (16, (torch.float8_e4m3fn,))
        if factor
        else (
            32,
            (torch.uint8, torch.float8_e8m0fnu),
        )
    )
    *outer, n_bytes = specs[values].shape
    expected = (*outer, 2 * n_bytes // per_scale)
    if tuple(specs[scale].shape) != expected or specs[scale].dtype not in dtypes:
        dtype = str(specs[scale].dtype).removeprefix("torch.")
        kind = "NVFP4" if factor else "MXFP4"
        raise UserError(
            f"{scale}, {dtype} {list(specs[scale].shape)}, cannot scale the weight {values} in "
            f"{kind}, which needs {list(expected)}"
        )
    if factor and specs[factor].shape.numel() != 1:
        raise UserError(f"{factor} has {specs[factor].shape.numel()} values, but must have one")
    return _FP4Weight(values, scale, torch.Size((*outer, 2 * n_bytes)), factor)

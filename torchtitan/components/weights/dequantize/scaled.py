"""Weights in FP8 and FP4, read as bfloat16: products of values and scales in float32, rounded.

In FP8, there is a scale for a whole weight, for each row or column, or for each block of rows and
columns. In FP4, a byte holds two values (E2M1, the lower half first), and 32 values of a row share
a power of two, stored as its exponent plus 127 (Open Compute Project, "Microscaling Formats
Specification", 2023). gpt-oss's files name these bytes `X_blocks` (experts, outputs, groups, 16)
and the scales `X_scales`; its weight `X` is (experts, inputs, outputs).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

from torchtitan.components.weights.dequantize.weight import QuantizedWeight, read_part
from torchtitan.components.weights.few_bits import TABLES, FewBits, kept_group
from torchtitan.protocols.tensor_source import TensorSource, TensorSpec
from torchtitan.tools.errors import UserError

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_POWERS = (torch.float8_e8m0fnu, torch.uint8)
_SCALES = (torch.float32, torch.bfloat16, torch.float16, *_POWERS)
_PACKED = "_blocks"

_FP4 = torch.tensor(TABLES["e2m1"])
_PAIRS = torch.cartesian_prod(_FP4, _FP4).flip(1)
"""The two FP4 values of each byte."""


def scaled_weights(
    specs: Mapping[str, TensorSpec], block: Sequence[int] = (1, 1)
) -> dict[str, QuantizedWeight]:
    """Return the weights in FP8 and FP4 by name. Raise `UserError`, naming the tensor, if a scale
    is missing or wrong.

    Args:
        specs: stored tensors.
        block: rows and columns of a weight in FP8 that share a scale; (1, 1): no such blocks.
    """
    found = [_find_weight(name, specs, block) for name in specs]
    return {weight.values.removesuffix(_PACKED): weight for weight in found if weight}


@dataclass
class _ScaledWeight(QuantizedWeight):
    values: str
    scale: str
    dtype: torch.dtype
    scale_dtype: torch.dtype
    shape: torch.Size
    """Of the stored values; the weight of packed experts is transposed."""
    steps: tuple[int, ...]
    """Per dimension, how many consecutive values share a scale; () for a single scale."""

    def __post_init__(self) -> None:
        spec_shape = (self.shape[0], *self.shape[:0:-1]) if self._is_transposed else self.shape
        self.spec = TensorSpec(torch.Size(spec_shape), torch.bfloat16)
        self.stored = (self.values, self.scale)

    @property
    def kept(self) -> FewBits | str:
        inputs, step = self.shape[-1], self.steps[-1] if self.steps else 0
        # Stacked matrices may be (experts, inputs, outputs), with a scale for each output.
        if step == 1 and len(self.shape) > 2 and self.steps[-2] == self.shape[-2]:
            inputs, step = self.shape[-2], self.steps[-2]
        group = kept_group(step, inputs) if self.steps else 0
        if group == 1:
            return "each of its inputs has its own scale"
        if inputs % 8:
            return f"its {inputs} inputs are not whole bytes"
        return FewBits(self._codes, group, self._scale_name, "bfloat16")

    def read(self, source: TensorSource, items: slice) -> Tensor:
        values = read_part(source, self.values, items)
        if values.dtype not in _FP8:
            values = unpack_fp4(values).flatten(len(self.shape) - 1)
        if not self.steps:
            scale = _to_float(source.read(self.scale)).reshape(())
            return values.float().mul_(scale).bfloat16()
        scale = self._expanded(_to_float(self._scale_of(source, items)), items, values.shape)
        product = values.float().mul_(scale).bfloat16()
        return product.mT if self._is_transposed else product

    def part(self, source: TensorSource, items: slice, part: str) -> Tensor:
        codes = read_part(source, self.values, items).view(torch.uint8)
        if self.dtype not in _FP8:
            codes = fp4_codes(codes).flatten(len(self.shape) - 1)
        if part == "packed":
            result = codes
        elif not self.steps:
            result = source.read(self.scale).reshape(()).expand(codes.shape)
        else:
            result = self._expanded(self._scale_of(source, items), items, codes.shape)
        if result.dtype.itemsize == 1:
            result = result.view(torch.uint8)
        return result.mT if self._is_transposed else result

    @property
    def _is_transposed(self) -> bool:
        return self.values.endswith(_PACKED)

    @property
    def _codes(self) -> str:
        return {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}.get(self.dtype, "e2m1")

    @property
    def _scale_name(self) -> str:
        if self.scale_dtype in _POWERS:
            return "e8m0"
        return str(self.scale_dtype).removeprefix("torch.")

    def _scale_of(self, source: TensorSource, items: slice) -> Tensor:
        step = self.steps[0]
        return read_part(source, self.scale, slice(items.start // step, ceil(items.stop / step)))

    def _expanded(self, scale: Tensor, items: slice, shape: torch.Size) -> Tensor:
        """Return the scale of each value of `items`."""
        for dim, step in enumerate(self.steps):
            if scale.shape[dim] > 1:
                start = items.start % step if dim == 0 else 0
                scale = scale.repeat_interleave(step, dim).narrow(dim, start, shape[dim])
        return scale.expand(shape)


def fp4_codes(packed: Tensor) -> Tensor:
    """Return the codes (..., n, 2) of bytes (..., n)."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), -1)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Return the values (..., n, 2) of bytes (..., n), float32."""
    # faster than indexing
    return functional.embedding(packed.view(torch.uint8).int(), _PAIRS)


def _to_float(scale: Tensor) -> Tensor:
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def _find_weight(
    name: str, specs: Mapping[str, TensorSpec], block: Sequence[int]
) -> _ScaledWeight | None:
    """Return the weight with the values `name`; None for other tensors."""
    spec, (layer, _, kind) = specs[name], name.rpartition(".")
    is_packed = name.endswith(_PACKED) and spec.dtype == torch.uint8 and len(spec.shape) == 4
    names = (
        [name.removesuffix(_PACKED) + "_scales"]
        if is_packed
        else [f"{name}_scale_inv", f"{name}_scale"]
    )
    names += [f"{layer}.scale", f"{layer}.qscale_weight"] if kind == "weight" else []
    scale = next((each for each in names if each in specs), "")
    # DeepSeek-V4's experts are FP4 in bytes of type int8.
    is_fp4 = is_packed or bool(scale) and spec.dtype == torch.int8 and specs[scale].dtype in _POWERS
    is_scale = name.endswith("weight_scale")  # NVFP4's are in FP8
    if not is_fp4 and (spec.dtype not in _FP8 or len(spec.shape) < 2 or is_scale):
        return None
    if not scale:
        raise UserError(f"{name} is quantized, but its scale {names[0]} is missing")
    n_outer, stored = 2 if is_packed else len(spec.shape) - 1, specs[scale]
    shape = (*spec.shape[:n_outer], spec.shape[n_outer:].numel() * (2 if is_fp4 else 1))
    steps = _find_steps(stored.shape, shape, (1, 32) if is_fp4 else block)
    if steps is None or stored.dtype not in _SCALES or is_packed and stored.shape != spec.shape[:3]:
        dtype = str(stored.dtype).removeprefix("torch.")
        raise UserError(
            f"{scale}, {dtype} {list(stored.shape)}, cannot scale the weight {name} {list(shape)}"
        )
    return _ScaledWeight(name, scale, spec.dtype, stored.dtype, torch.Size(shape), steps)


def _find_steps(
    scale: torch.Size, shape: Sequence[int], block: Sequence[int]
) -> tuple[int, ...] | None:
    """Return `_Weight.steps` for scales of blocks, or of whole rows, columns or tensors; None if
    the shape is wrong."""
    if len(scale) != len(shape):
        return () if scale.numel() == 1 else None
    n_matrix = len(block)
    of_blocks = [ceil(size / n) for size, n in zip(shape[-n_matrix:], block, strict=True)]
    whole = [{size: 1, 1: max(1, size)} for size in shape]
    steps = tuple(found.get(n_scales, 0) for found, n_scales in zip(whole, scale, strict=True))
    if list(scale[-n_matrix:]) == of_blocks:
        steps = (*steps[:-n_matrix], *block)
    return steps if all(steps) else None

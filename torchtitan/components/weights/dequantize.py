"""Quantized weights of Hugging Face checkpoints, read as bfloat16: products of values and scales in
float32, rounded.

In FP8, there is a scale for a whole weight, for each row or column, or for each block of rows and
columns. In FP4, a byte holds two values (E2M1, the lower half first), and 32 values of a row share
a power of two, stored as its exponent plus 127 (Open Compute Project, "Microscaling Formats
Specification", 2023). gpt-oss's files name these bytes `X_blocks` (experts, outputs, groups, 16)
and the scales `X_scales`; its weight `X` is (experts, inputs, outputs).
"""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torchtitan.protocols.tensor_source import (
    Slices,
    TensorSource,
    TensorSpec,
    full_slices,
    slice_shape,
)
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object

_METHODS = ("fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors (float-quantized)")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_POWERS = (torch.float8_e8m0fnu, torch.uint8)
_SCALES = (torch.float32, torch.bfloat16, torch.float16, *_POWERS)
_OTHER_SCALES = (
    "activation_scale",
    ".input_scale",
    ".input_scale_ub",
    ".qscale_act",
    ".k_scale",
    ".v_scale",
)
"""Name endings of unused scales, which are not for weights."""

_COMPUTED_ELEMENTS = 2**24
_PACKED = "_blocks"

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_PAIRS = torch.cartesian_prod(torch.cat([_FP4, -_FP4]), torch.cat([_FP4, -_FP4])).flip(1)
"""The two FP4 values of each byte."""


class _Weight(NamedTuple):
    values: str
    scale: str
    shape: torch.Size
    steps: tuple[int, ...]
    """Per dimension, how many consecutive values share a scale; () for a single scale."""


def check_quantization(folder: Path) -> None:
    """Raise `UserError` if the config.json in `folder` names an unsupported method of
    quantization."""
    method, _ = read_method(folder)
    if method and method not in _METHODS:
        raise UserError(
            f"config.json: quantization_config has '{method}', and only weights of "
            f"{', '.join(_METHODS)} can be loaded; use the model before quantization"
        )


def dequantized(source: TensorSource, folder: Path) -> TensorSource:
    """Return the tensors of the Hugging Face checkpoint in `folder`: a `DequantizedSource` if its
    config.json names a supported method, otherwise `source`. Raise `UserError` if the config.json
    is invalid, and as that class."""
    method, section = read_method(folder)
    if method not in _METHODS:
        return source
    block = section.get("weight_block_size", [128, 128]) if method == "fp8" else None
    if not (
        block is None
        or isinstance(block, list)
        and [type(n) for n in block] == [int, int]
        and min(block) > 0
    ):
        raise UserError(
            f"config.json: weight_block_size is {block!r}, but must be two whole numbers above 0"
        )
    return DequantizedSource(source, method, block)


def read_method(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the method of quantization ("" for none; with the format, if it has several) and its
    configuration."""
    document = read_object(folder / "config.json")
    text = document.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    section = document.get("quantization_config") or nested
    if not isinstance(section, dict):
        return str(section or ""), {}
    method = str(section.get("quant_method", "unknown"))
    return (
        f"{method} ({section.get('format')})" if method == "compressed-tensors" else method,
        section,
    )


class DequantizedSource(TensorSource):
    """Tensors of `source` with bfloat16 weights instead of quantized weights and their scales. Only
    the requested items of the first dimension are read, in chunks. Raises `UserError`, naming the
    tensor, if a scale is missing or wrong.

    Args:
        source: tensors of a Hugging Face checkpoint.
        method: name of the method of quantization.
        block: rows and columns of a weight in FP8 that share a scale; None: no such blocks.
    """

    def __init__(self, source: TensorSource, method: str, block: Sequence[int] | None):
        self.method = method
        self._source = source
        found = [_find_weight(name, source.specs, block or (1, 1)) for name in source.specs]
        self._weights = {weight.values.removesuffix(_PACKED): weight for weight in found if weight}
        used = {name for weight in self._weights.values() for name in (weight.values, weight.scale)}
        others = (
            name for name in source.specs if name not in used and not name.endswith(_OTHER_SCALES)
        )
        weights = {
            name: TensorSpec(weight.shape, torch.bfloat16) for name, weight in self._weights.items()
        }
        self.specs = {**{name: source.specs[name] for name in others}, **weights}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        if name not in self._weights:
            return self._source.read(name, slices)
        first, *others = part = slices or full_slices(self.specs[name].shape)
        result = torch.empty(slice_shape(part), dtype=torch.bfloat16)
        n_items = max(1, _COMPUTED_ELEMENTS // max(1, self.specs[name].shape[1:].numel()))
        for start in range(first.start, first.stop, n_items):
            items = slice(start, min(start + n_items, first.stop))
            weight = self._compute(self._weights[name], items)
            result[start - first.start :][: len(weight)] = weight[(slice(None), *others)]
        return result

    def _compute(self, weight: _Weight, items: slice) -> Tensor:
        """Return `items` of the first dimension of a weight."""
        values = self._read(weight.values, items)
        if values.dtype not in _FP8:
            # faster than indexing
            pairs = functional.embedding(values.view(torch.uint8).int(), _PAIRS)
            values = pairs.flatten(len(weight.shape) - 1)
        if not weight.steps:
            return (
                values.float()
                .mul_(_to_float(self._source.read(weight.scale)).reshape(()))
                .bfloat16()
            )
        step = weight.steps[0]
        scale = _to_float(
            self._read(weight.scale, slice(items.start // step, ceil(items.stop / step)))
        )
        for dim, step in enumerate(weight.steps):
            if scale.shape[dim] > 1:
                start = items.start % step if dim == 0 else 0
                scale = scale.repeat_interleave(step, dim).narrow(dim, start, values.shape[dim])
        product = values.float().mul_(scale).bfloat16()
        return product.mT if weight.values.endswith(_PACKED) else product

    def _read(self, name: str, items: slice) -> Tensor:
        return self._source.read(name, (items, *full_slices(self._source.specs[name].shape)[1:]))


def _to_float(scale: Tensor) -> Tensor:
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def _find_weight(
    name: str, specs: Mapping[str, TensorSpec], block: Sequence[int]
) -> _Weight | None:
    """Return the quantized weight with the values `name`; None for other tensors."""
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
    if not is_fp4 and (spec.dtype not in _FP8 or len(spec.shape) < 2):
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
    return _Weight(
        name, scale, torch.Size((shape[0], *shape[:0:-1]) if is_packed else shape), steps
    )


def _find_steps(
    scale: torch.Size, shape: Sequence[int], block: Sequence[int]
) -> tuple[int, ...] | None:
    """Return `_Weight.steps` for scales of blocks, or of whole rows, columns or tensors; None if
    the shape is wrong."""
    if len(scale) != len(shape):
        return () if scale.numel() == 1 else None
    blocks = (*[1] * (len(shape) - 2), *block)
    possible = [
        {ceil(size / n): n, size: 1, 1: max(1, size)} for size, n in zip(shape, blocks, strict=True)
    ]
    steps = tuple(found.get(n_scales, 0) for found, n_scales in zip(possible, scale, strict=True))
    return steps if all(steps) else None

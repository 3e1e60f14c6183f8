"""Weights of bitsandbytes: codes of 4 bits (NF4, FP4) with a maximum for each block of values, and
int8 with a maximum for each row.

A 4-bit weight is stored as bytes (n / 2, 1), the upper half first, with a table of 16 values
`quant_map`, the maxima `absmax` of its blocks, and a JSON text that has its shape. Maxima may be
quantized themselves, with a table of 256 values, maxima of their blocks and an offset.

Source: the code for unpacking in bitsandbytes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, gcd
from typing import Any

import torch
from torch import Tensor

from torchtitan.components.weights.dequantize.weight import QuantizedWeight, read_part
from torchtitan.components.weights.few_bits import DYNAMIC_MAP, TABLES, FewBits, kept_group
from torchtitan.protocols.tensor_source import TensorSource, TensorSpec, full_slices
from torchtitan.tools.errors import UserError

_STATES = tuple(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_MAXIMUM = ".SCB"
_LAYOUT = ".weight_format"
_TYPES = ("bfloat16", "float16", "float32")


@dataclass
class _FourBitWeight(QuantizedWeight):
    spec: TensorSpec
    name: str
    state: str
    block: int
    """Values that share a maximum."""
    nested_block: int
    """Maxima that share a maximum; 0: they are not quantized."""
    nested_offset: float
    kind: str
    """`nf4` or `fp4`."""
    has_own_levels: bool
    """True if its tables differ from the library's."""

    def __post_init__(self) -> None:
        names = ["absmax", "quant_map"]
        if self.nested_block:
            names += ["nested_absmax", "nested_quant_map"]
        self.stored = (self.name, self.state, *(f"{self.name}.{name}" for name in names))

    @property
    def kept(self) -> FewBits | str:
        width = self.spec.shape[-1]
        if self.has_own_levels:
            return "its table of values differs from the table of bitsandbytes"
        if width % self.block:
            return f"its {width} inputs are not whole blocks of {self.block} values"
        dtype = str(self.spec.dtype).removeprefix("torch.")
        if not self.nested_block:
            return FewBits(self.kind, kept_group(self.block, width), "float32", dtype)
        n_blocks = width // self.block
        run = gcd(self.nested_block, n_blocks)  # maxima are grouped across rows
        is_whole_row = run == n_blocks or n_blocks * self.spec.shape[0] <= self.nested_block
        group = kept_group(self.block, width)
        return FewBits(self.kind, group, "dynamic", dtype, 0 if is_whole_row else run)

    def read(self, source: TensorSource, items: slice) -> Tensor:
        table = source.read(f"{self.name}.quant_map").float()
        codes = self._codes(source, items).int()
        maxima = self._of_values(items, lambda blocks: self._maxima(source, blocks))
        return (table[codes] * maxima).to(self.spec.dtype)

    def part(self, source: TensorSource, items: slice, part: str) -> Tensor:
        if part == "packed":
            return self._codes(source, items)
        if part == "scales":
            name = f"{self.name}.absmax"
            return self._of_values(items, lambda blocks: read_part(source, name, blocks))
        return self._of_values(items, lambda blocks: self._ranges(source, blocks))

    def _codes(self, source: TensorSource, items: slice) -> Tensor:
        start, stop = self._flat(items)
        packed = read_part(source, self.name, slice(start // 2, ceil(stop / 2))).flatten()
        codes = torch.stack((packed >> 4, packed & 15), 1).flatten()
        return codes.narrow(0, start % 2, stop - start).reshape(self._shape(items))

    def _of_values(self, items: slice, read: Callable[[slice], Tensor]) -> Tensor:
        """Return for each value of `items` what `read` returns for blocks."""
        start, stop = self._flat(items)
        first = start // self.block
        of_blocks = read(slice(first, ceil(stop / self.block)))
        of_values = of_blocks.repeat_interleave(self.block)
        return of_values.narrow(0, start - first * self.block, stop - start).reshape(
            self._shape(items)
        )

    def _flat(self, items: slice) -> tuple[int, int]:
        """Return the first and last place of `items` in the flat weight."""
        n_per_item = self.spec.shape[1:].numel()
        return items.start * n_per_item, items.stop * n_per_item

    def _shape(self, items: slice) -> tuple[int, ...]:
        return (items.stop - items.start, *self.spec.shape[1:])

    def _ranges(self, source: TensorSource, blocks: slice) -> Tensor:
        """Return offset and step of the scale of each block, two float32 numbers as int64."""
        groups = torch.arange(blocks.start, blocks.stop) // self.nested_block
        steps = source.read(f"{self.name}.nested_absmax").float()[groups]
        offsets = torch.full_like(steps, self.nested_offset)
        return torch.stack((offsets, steps), 1).view(torch.int64).flatten()

    def _maxima(self, source: TensorSource, blocks: slice) -> Tensor:
        maxima = read_part(source, f"{self.name}.absmax", blocks)
        if not self.nested_block:
            return maxima.float()
        table = source.read(f"{self.name}.nested_quant_map").float()
        groups = torch.arange(blocks.start, blocks.stop) // self.nested_block
        scales = source.read(f"{self.name}.nested_absmax").float()[groups]
        return table[maxima.int()] * scales + self.nested_offset


@dataclass
class _Int8Weight(QuantizedWeight):
    spec: TensorSpec
    name: str
    maximum: str
    layout: str

    def __post_init__(self) -> None:
        self.stored = tuple(filter(None, (self.name, self.maximum, self.layout)))

    @property
    def kept(self) -> FewBits | str:
        dtype = str(self.spec.dtype).removeprefix("torch.")
        return FewBits("int8/127", 0, "float32", dtype)

    def part(self, source: TensorSource, items: slice, part: str) -> Tensor:
        values = read_part(source, self.name, items)
        if part == "packed":
            return values.view(torch.uint8) ^ 128
        return read_part(source, self.maximum, items).float()[:, None].expand(values.shape)

    def read(self, source: TensorSource, items: slice) -> Tensor:
        values = read_part(source, self.name, items)
        maximum = read_part(source, self.maximum, items).float()
        return (values * maximum[:, None] * (1 / 127)).to(self.spec.dtype)


def bitsandbytes_weights(source: TensorSource, dtype: torch.dtype) -> dict[str, QuantizedWeight]:
    """Return the weights of bitsandbytes by name; 4-bit weights have the type from before.

    Args:
        source: stored tensors.
        dtype: type of int8 weights after reading.

    Raises:
        UserError: a tensor is missing or damaged.
    """
    weights: dict[str, QuantizedWeight] = {}
    for name in source.specs:
        ending = next((ending for ending in _STATES if name.endswith(ending)), None)
        if ending is not None:
            weight = name.removesuffix(ending)
            weights[weight] = _four_bit(source, weight, name)
        elif name.endswith(_MAXIMUM):
            layer = name.removesuffix(_MAXIMUM)
            weights[f"{layer}.weight"] = _int8(source, layer, dtype)
    return weights


def _four_bit(source: TensorSource, name: str, state_name: str) -> _FourBitWeight:
    state = _json(source.read(state_name), state_name)
    nested = int(state.get("nested_blocksize") or 0)
    shape = torch.Size(state["shape"])
    weight = _FourBitWeight(
        spec=TensorSpec(shape, getattr(torch, state["dtype"])),
        name=name,
        state=state_name,
        block=int(state["blocksize"]),
        nested_block=nested,
        nested_offset=float(state.get("nested_offset") or 0),
        kind=state_name[-3:],
        has_own_levels=False,
    )
    n_blocks = ceil(shape.numel() / weight.block)
    expected = {name: ceil(shape.numel() / 2), f"{name}.absmax": n_blocks, f"{name}.quant_map": 16}
    if nested:
        expected |= {
            f"{name}.nested_absmax": ceil(n_blocks / nested),
            f"{name}.nested_quant_map": 256,
        }
    for part, size in expected.items():
        if part not in source.specs:
            raise UserError(f"{part}, which a quantized weight needs, is missing")
        if source.specs[part].shape.numel() != size:
            found = list(source.specs[part].shape)
            raise UserError(f"{part} is {found}, but must have {size:,} values for its weight")
    tables = {"quant_map": torch.tensor(TABLES[weight.kind])}
    if nested:
        tables["nested_quant_map"] = DYNAMIC_MAP
    weight.has_own_levels = any(
        not torch.equal(source.read(f"{name}.{key}").float(), table)
        for key, table in tables.items()
    )
    return weight


def _json(tensor: Tensor, name: str) -> Mapping[str, Any]:
    """Return the description of a 4-bit weight, with its required entries."""
    try:
        state = json.loads(tensor.to(torch.uint8).numpy().tobytes())
        shape = state["shape"]
        is_valid = (
            all(type(n) is int and n > 0 for n in (*shape, state["blocksize"]))
            and len(shape) > 0
            and state["dtype"] in _TYPES
        )
    except (ValueError, LookupError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise UserError(f"{name} is damaged: it has no shape, type and block size of its weight")
    assert isinstance(state, dict)
    return state


def _int8(source: TensorSource, layer: str, dtype: torch.dtype) -> _Int8Weight:
    specs = source.specs
    name = f"{layer}.weight"
    maximum = f"{layer}{_MAXIMUM}"
    layout = f"{layer}{_LAYOUT}"
    if name not in specs or specs[name].dtype != torch.int8 or len(specs[name].shape) != 2:
        raise UserError(f"{maximum} belongs to no weight {name} of int8 with two dimensions")
    if specs[maximum].shape != specs[name].shape[:1]:
        raise UserError(
            f"{maximum} is {list(specs[maximum].shape)}, but {name} has {specs[name].shape[0]} rows"
        )
    if layout not in specs:
        layout = ""
    elif (order := int(source.read(layout, full_slices(specs[layout].shape)))) != 0:
        raise UserError(f"{layout} is {order}: only weights in row order (0) can be read")
    return _Int8Weight(TensorSpec(specs[name].shape, dtype), name, maximum, layout)

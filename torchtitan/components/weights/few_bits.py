"""Weights in few bits, row by row: the form that published weights and our own NF4 are kept in.

A weight (…, in) becomes up to four tensors of uint8, which mixed precision does not cast. Each of
their rows depends on the same row of the weight alone, so they are sharded, saved and loaded like
the rows of any weight:

- `packed` (…, in * bits / 8): codes of the values. Of 4 bits, the first is in the upper half of a
  byte; codes of other sizes follow each other from the lowest bit on;
- `scales` (…, groups) or (…, groups, bytes): a scale for each group of neighboring inputs;
- `zeros` (…, groups): codes that mean 0, if they differ from group to group;
- `scale_ranges` (…, 8) or (…, runs, 8): offset and step, two float32 numbers as their bytes, of
  scales that are in 8 bits themselves.

A value is `(level of the code - zero) * scale`, computed in float32 and rounded once, to the type
that the library which wrote the weight dequantizes to: the same numbers in any compute type.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_VALUES = 2**23
"""Number of values unpacked at a time; temporaries take about 10 bytes per value."""

NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Values of the codes of NF4: quantiles of the normal distribution, scaled to [-1, 1], with an
exact 0 (arXiv:2305.14314, appendix E)."""

_FP4 = (
    *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0),
    *(0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

TABLES: Mapping[str, tuple[float, ...]] = {
    "nf4": NF4_LEVELS,
    "fp4": (*_FP4, *(-value for value in _FP4)),
    "e2m1": (*_E2M1, *(-value for value in _E2M1)),
    "int4": tuple(map(float, range(-8, 8))),
    "uint4": tuple(map(float, range(16))),
}
"""Codes of 4 bits → their levels. `fp4` belongs to bitsandbytes, `e2m1` to MXFP4 and NVFP4."""

_PAIRS = {
    name: torch.tensor([(first, second) for first in levels for second in levels], device="cpu")
    for name, levels in TABLES.items()
}
"""Byte → its two values."""

_FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""Codes of 8 bits that are floating-point numbers."""

_MULTIPLIERS = {"int8/127": 1 / 127}
"""Codes whose products with the scale are multiplied by a number."""


class _Scales(NamedTuple):
    dtype: torch.dtype
    is_coded: bool = False
    """True if `scale_ranges` say what they mean."""


_SCALES = {
    **{
        str(dtype).removeprefix("torch."): _Scales(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
    "e8m0": _Scales(torch.float8_e8m0fnu),
    "linear": _Scales(torch.uint8, True),
    "dynamic": _Scales(torch.uint8, True),
    "e4m3 times": _Scales(torch.float8_e4m3fn, True),
    "e4m3 over": _Scales(torch.float8_e4m3fn, True),
}
"""Forms of stored scales. Of coded ones, `linear` are steps from an offset (our NF4), `dynamic` are
codes of a table (bitsandbytes), and `e4m3` are times the step or over it (NVFP4)."""


_FORM = re.compile(
    rf"({'|'.join([*TABLES, *_FLOATS, *_MULTIPLIERS])}|u?int[2-8])"
    rf":\d{{1,9}}:({'|'.join(_SCALES)}):(float32|bfloat16|float16):\d{{1,9}}"
)
"""`FewBits.text`."""


@dataclass(frozen=True)
class FewBits:
    """Form of a weight that is stored in few bits."""

    codes: str
    """`nf4`, `fp4`, `e2m1`, `e4m3`, `e5m2`, signed integers `int2` to `int8`, unsigned ones with
    zero points `uint2` to `uint8`, or `int8/127`."""
    group: int
    """Neighboring inputs that share a scale; 0: all inputs."""
    scales: str
    """Type or code of the scales (`_SCALES`)."""
    dtype: str
    """Type that values are rounded to."""
    run: int = 0
    """Neighboring groups that share a scale of their scales; 0: all of a row."""

    @property
    def text(self) -> str:
        """This form in one word."""
        return ":".join(map(str, astuple(self)))

    @classmethod
    def parse(cls, text: str) -> "FewBits":
        """Return the form with this `text`. Raise `ValueError` for another text."""
        if not _FORM.fullmatch(text):
            raise ValueError(f"{text!r} is not the form of a weight in few bits")
        codes, group, scales, dtype, run = text.split(":")
        return cls(codes, int(group), scales, dtype, int(run))

    @property
    def bits(self) -> int:
        """Bits of a code."""
        if self.codes in TABLES:
            return 4
        if self.codes in _FLOATS or self.codes in _MULTIPLIERS:
            return 8
        return int(self.codes.removeprefix("u").removeprefix("int"))

    @property
    def has_zeros(self) -> bool:
        return self.codes.startswith("uint")

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors, in the order of `unpack`'s arguments."""
        zeros = ("zeros",) if self.has_zeros else ()
        ranges = ("scale_ranges",) if _SCALES[self.scales].is_coded else ()
        return ("packed", "scales", *zeros, *ranges)

    @property
    def value_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def scale_dtype(self) -> torch.dtype:
        return _SCALES[self.scales].dtype

    def part_shape(self, part: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a part of a weight of `shape`."""
        *rows, width = shape
        group = self.group or width
        n_groups = width // group
        if part == "packed":
            return (*rows, width * self.bits // 8)
        if part == "scale_ranges":
            n_runs = n_groups // (self.run or n_groups)
            return (*rows, 8) if n_runs == 1 else (*rows, n_runs, 8)
        n_bytes = self.scale_dtype.itemsize if part == "scales" else 1
        return (*rows, n_groups, n_bytes) if n_bytes > 1 else (*rows, n_groups)

    def follows_inputs(self, part: str, width: int) -> bool:
        """Return whether ranks that divide the inputs of a weight also divide this part."""
        n_groups = width // (self.group or width)
        n_runs = n_groups // (self.run or n_groups)
        return part == "packed" or (n_runs if part == "scale_ranges" else n_groups) > 1

    def width(self, packed: Tensor) -> int:
        """Return the inputs of a weight with these codes."""
        return packed.shape[-1] * 8 // self.bits

    def pack_part(self, part: str, rows: Tensor) -> Tensor:
        """Return a part from its `TensorSource.of_part`: rows (…, in) with the code, scale, zero
        point or range of each value. Raise `ValueError` if the values of a group have several."""
        if part == "packed":
            return _join_bits(rows.to(torch.uint8), self.bits)
        width = rows.shape[-1]
        group = self.group or width
        if part == "scale_ranges":
            group *= self.run or width // group
            ranges = _first_of(rows.to(torch.int64), group).view(torch.uint8)
            return ranges.unflatten(-1, (-1, 8)) if ranges.shape[-1] > 8 else ranges
        n_bytes = self.scale_dtype.itemsize if part == "scales" else 1
        dtype = self.scale_dtype if n_bytes > 1 else torch.uint8
        stored = _first_of(rows.to(dtype), group).view(torch.uint8)
        return stored.unflatten(-1, (-1, n_bytes)) if n_bytes > 1 else stored


def kept_group(group: int, width: int) -> int:
    """Return the group of a `FewBits` for scales of `group` inputs (the last group may have fewer):
    the largest that has a single scale."""
    return 0 if group >= width else gcd(group, width)


def unpack(form: FewBits, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the weight (…, in) of a form's `parts` in `dtype`."""
    packed, *_ = parts
    *rows, _ = packed.shape
    width = form.width(packed)
    if packed.is_meta:  # there is nothing to compute, and a large model has many chunks
        return packed.new_empty((*rows, width), dtype=dtype)
    flat = [part.flatten(0, len(rows) - 1) for part in parts]
    tables = tables_of(form, packed.device)
    if torch.compiler.is_compiling():  # fuses the operations without temporaries
        return unpack_rows(form, tables, *flat).to(dtype).view(*rows, width)
    n = flat[0].shape[0]
    values = packed.new_empty((n, width), dtype=form.value_dtype)
    for chunk in row_chunks(n, width):
        values[chunk] = unpack_rows(form, tables, *(part[chunk] for part in flat))
    return values.to(dtype).view(*rows, width)


def unpack_rows(form: FewBits, tables: Mapping[str, Tensor], *parts: Tensor) -> Tensor:
    """Return rows (n, in) of a form's `parts` (n, …), in one pass."""
    packed, scales, *others = parts
    zeros = others.pop(0) if form.has_zeros else None
    scale = _decode_scales(form, tables, scales, others[0] if others else None)
    levels = _levels(form, tables, packed).unflatten(1, (scale.shape[1], -1))
    if zeros is not None:
        levels = levels - zeros[..., None]
    values = levels * scale[..., None]
    if form.codes in _MULTIPLIERS:
        values = values * _MULTIPLIERS[form.codes]
    return values.flatten(1).to(form.value_dtype)


def tables_of(form: FewBits, device: torch.device) -> dict[str, Tensor]:
    """Return the tables that `unpack_rows` reads, on a device."""
    tables = {}
    if form.codes in _PAIRS:
        tables["pairs"] = _PAIRS[form.codes].to(device, non_blocking=True)
    if form.scales == "dynamic":
        tables["dynamic"] = DYNAMIC_MAP.to(device, non_blocking=True)
    return tables


def _levels(form: FewBits, tables: Mapping[str, Tensor], packed: Tensor) -> Tensor:
    """Return the levels of rows of codes, (n, in) in float32."""
    if form.codes in TABLES:
        return F.embedding(packed.int(), tables["pairs"]).flatten(1)
    if form.codes in _FLOATS:
        return packed.view(_FLOATS[form.codes]).float()
    codes = packed if form.bits == 8 else _split_bits(packed, form.bits)
    return codes.float() - (0 if form.has_zeros else 1 << (form.bits - 1))


def _decode_scales(
    form: FewBits, tables: Mapping[str, Tensor], scales: Tensor, ranges: Tensor | None
) -> Tensor:
    """Return the scales of groups, (n, groups) in float32."""
    stored = scales if form.scale_dtype == torch.uint8 else scales.view(form.scale_dtype)
    stored = stored.flatten(1)
    if ranges is None:
        return stored.float()
    runs = ranges.view(torch.float32)
    offset, step = (runs if runs.ndim == 3 else runs[:, None]).split(1, dim=2)
    if form.scales == "dynamic":
        stored = F.embedding(stored.int(), tables["dynamic"][:, None]).squeeze(-1)
    codes = stored.float().unflatten(1, (offset.shape[1], -1))
    if form.scales == "e4m3 over":
        return (codes / step).flatten(1)
    return (offset + step * codes).flatten(1)


def _dynamic_map() -> Tensor:
    """Return the 256 levels of bitsandbytes' scales of scales: for each of seven decades, the
    centers of equal parts (8-bit dynamic tree, arXiv:1511.04561)."""
    levels = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, device="cpu")
        centers = (edges[:-1] + edges[1:]) / 2
        for sign in (1, -1):
            levels += (sign * 10 ** (exponent - 6) * centers).tolist()
    return torch.tensor(sorted(levels), device="cpu")


DYNAMIC_MAP = _dynamic_map()


def row_chunks(n_rows: int, width: int) -> Iterator[slice]:
    """Yield slices of rows that are packed or unpacked at a time."""
    size = max(1, _CHUNK_VALUES // width)
    for first in range(0, n_rows, size):
        yield slice(first, min(first + size, n_rows))


def _first_of(rows: Tensor, group: int) -> Tensor:
    """Return the first value of each group of a row, which all values of the group equal."""
    groups = rows.unflatten(-1, (-1, group))
    if (groups != groups).any():
        raise ValueError("some of its scales are NaN")
    if (groups != groups[..., :1]).any():
        raise ValueError(f"{group} neighboring inputs have several scales or zero points")
    return groups[..., 0].clone(memory_format=torch.contiguous_format)  # to view its bytes


def _join_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack rows of codes (…, in) into bytes (…, in * bits / 8)."""
    if bits == 8:
        return codes
    if bits == 4:
        first, second = codes.unflatten(-1, (-1, 2)).unbind(-1)
        return first << 4 | second
    places = bits * torch.arange(8, device=codes.device)
    words = (codes.unflatten(-1, (-1, 8)).long() << places).sum(-1, keepdim=True)
    return (words >> 8 * torch.arange(bits, device=codes.device) & 255).to(torch.uint8).flatten(-2)


def _split_bits(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of `_join_bits`."""
    places = 8 * torch.arange(bits, device=packed.device)
    words = (packed.unflatten(-1, (-1, bits)).long() << places).sum(-1, keepdim=True)
    places = bits * torch.arange(8, device=packed.device)
    return (words >> places & ((1 << bits) - 1)).flatten(-2)

"""Weights in integers of 2 to 8 bits with scales and zero points of groups of inputs. A weight
(outputs, inputs) is `scale * (integer - zero)`, computed in the type of the scales.

| | integers, and their packed dimension | zero points | scales |
|---|---|---|---|
| GPTQ | `qweight` (inputs, outputs), inputs | `qzeros`, outputs; minus 1 | (groups, outputs) |
| AWQ | `qweight` (inputs, outputs), outputs in its own order | `qzeros`, likewise | as GPTQ |
| compressed-tensors | `weight_packed` (outputs, inputs), inputs | outputs | (outputs, groups) |

Sources: the code for unpacking in AutoGPTQ, AutoAWQ and compressed-tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan.components.weights.dequantize.weight import QuantizedWeight, read_part
from torchtitan.components.weights.few_bits import FewBits, kept_group
from torchtitan.protocols.tensor_source import TensorSource, TensorSpec
from torchtitan.tools.errors import UserError

_WORD_BITS = 32

_SIZES = (2, 3, 4, 5, 6, 7, 8)
"""Bits of integers of compressed-tensors."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of AWQ of each of eight consecutive values."""


@dataclass
class _Packed:
    """Unsigned integers packed into words (int32) along one dimension of a matrix."""

    name: str
    bits: int
    packed_dim: int
    output_dim: int
    """Dimension of the outputs."""
    size: int
    """Integers along the packed dimension."""
    dense: bool = True
    """True if integers continue in the next word; otherwise a word holds whole ones, and ends with
    unused bits."""
    order: tuple[int, ...] | None = None
    """Position in a word of each integer; None: the lowest bits first."""

    def read(self, source: TensorSource, outputs: slice) -> Tensor:
        """Return the integers of some outputs, (outputs, others), int32."""
        if self.packed_dim != self.output_dim:
            words = read_part(source, self.name, outputs, self.output_dim)
            return self._unpacked(words).narrow(1, 0, self.size)
        per_block, words_per_block = self._block
        n_words = source.specs[self.name].shape[self.packed_dim]
        first = outputs.start // per_block
        stop = min(n_words, ceil(outputs.stop / per_block) * words_per_block)
        words = read_part(source, self.name, slice(first * words_per_block, stop), self.packed_dim)
        start = outputs.start - first * per_block
        return self._unpacked(words).narrow(1, start, outputs.stop - outputs.start).mT

    @property
    def _block(self) -> tuple[int, int]:
        """Integers and words of the shortest run that begins and ends with a whole integer."""
        if self.dense and _WORD_BITS % self.bits:
            return _WORD_BITS, self.bits
        return _WORD_BITS // self.bits, 1

    def _unpacked(self, words: Tensor) -> Tensor:
        """Return the integers of words, the packed dimension last."""
        words = words.movedim(self.packed_dim, 1)
        per_block, words_per_block = self._block
        missing = -words.shape[1] % words_per_block
        blocks = torch.nn.functional.pad(words, (0, missing)).unflatten(1, (-1, words_per_block))
        starts = torch.arange(per_block) * self.bits
        if self.order is not None:
            starts = torch.tensor(self.order) * self.bits
        mask = (1 << self.bits) - 1
        if words_per_block == 1:
            return ((blocks >> starts.int()) & mask).flatten(1)
        unsigned = blocks.long() & 0xFFFFFFFF
        # An integer may begin in one word and end in the next one.
        pairs = unsigned | torch.roll(unsigned, -1, 2) << _WORD_BITS
        values = pairs[:, :, starts // _WORD_BITS] >> (starts % _WORD_BITS)
        return (values & mask).int().flatten(1)


@dataclass
class _IntegerWeight(QuantizedWeight):
    spec: TensorSpec
    values: _Packed | str
    """Packed integers, or the name of int8."""
    zeros: _Packed | str | None
    """Zero points of groups; None: 0."""
    scale: str
    scale_output_dim: int
    group_size: int
    """Inputs of a group, unless `groups` names the group of each."""
    groups: str = ""
    value_offset: int = 0
    """Added to packed integers."""
    zero_offset: int = 0
    """Added to packed zero points; their carry is lost."""
    is_scattered: bool = False
    """True if inputs of a group are not neighbors."""

    def __post_init__(self) -> None:
        parts = (self.values, self.zeros)
        names = [part.name if isinstance(part, _Packed) else part for part in parts if part]
        self.stored = tuple(filter(None, (*names, self.scale, self.groups)))

    @property
    def kept(self) -> FewBits | str:
        width = self.spec.shape[1]
        if self.is_scattered:
            return (
                "the inputs of its groups are not neighbors (desc_act, actorder), and rows that "
                "are stored by themselves have no place for an order that all share"
            )
        if width % 8:
            return f"its {width} inputs are not whole bytes"
        bits = self.values.bits if isinstance(self.values, _Packed) else 8
        codes = f"int{bits}" if self.zeros is None else f"uint{bits}"
        dtype = str(self.spec.dtype).removeprefix("torch.")
        return FewBits(codes, kept_group(self.group_size, width), dtype, dtype)

    def read(self, source: TensorSource, items: slice) -> Tensor:
        integers = self._integers(source, items)
        scale = _of_outputs(source, self.scale, items, self.scale_output_dim)
        groups = self._groups(source, scale.shape[1])
        if self.zeros is not None:
            integers = integers - self._zeros(source, items)[:, groups]
        return integers.to(self.spec.dtype) * scale[:, groups]

    def part(self, source: TensorSource, items: slice, part: str) -> Tensor:
        bits = self.values.bits if isinstance(self.values, _Packed) else 8
        is_signed = self.value_offset or not isinstance(self.values, _Packed)
        lowest = -(1 << (bits - 1)) if is_signed else 0
        if part == "packed":
            return (self._integers(source, items) - lowest).to(torch.uint8)
        if part == "zeros":
            of_groups = (self._zeros(source, items) - lowest).to(torch.uint8)
        else:
            of_groups = _of_outputs(source, self.scale, items, self.scale_output_dim)
        return of_groups[:, self._groups(source, of_groups.shape[1])]

    def _integers(self, source: TensorSource, items: slice) -> Tensor:
        if isinstance(self.values, _Packed):
            return self.values.read(source, items) + self.value_offset
        return read_part(source, self.values, items).int()

    def _zeros(self, source: TensorSource, items: slice) -> Tensor:
        """Return the zero points of outputs, (outputs, groups)."""
        if isinstance(self.zeros, _Packed):
            return self._shifted(self.zeros.read(source, items), self.zeros.bits)
        assert self.zeros is not None
        return _of_outputs(source, self.zeros, items, 0).int()

    def _shifted(self, zeros: Tensor, bits: int) -> Tensor:
        if self.zero_offset > 0:
            return (zeros + self.zero_offset) & ((1 << bits) - 1)
        return zeros + self.zero_offset

    def _groups(self, source: TensorSource, n_groups: int) -> Tensor:
        """Return the group of each input."""
        if self.groups and n_groups > 1:
            groups = source.read(self.groups).long()
            if groups.min() < 0 or groups.max() >= n_groups:
                raise UserError(f"{self.groups} names groups outside 0 to {n_groups - 1}")
            return groups
        return torch.arange(self.spec.shape[1]) // self.group_size


def _is_scattered(source: TensorSource, index: str, group_size: int) -> bool:
    """Return whether `index`, the group of each input, differs from groups of neighbors. Files of
    GPTQ have it in any case, and with `desc_act`, static groups are still neighbors."""
    if index not in source.specs:
        return False
    groups = source.read(index)
    return not torch.equal(groups.long(), torch.arange(len(groups)) // group_size)


def _of_outputs(source: TensorSource, name: str, outputs: slice, dim: int) -> Tensor:
    """Return the scales or zero points of outputs, (outputs, groups); a single one is for all."""
    if source.specs[name].shape.numel() == 1:
        return source.read(name).reshape(1, 1).expand(outputs.stop - outputs.start, 1)
    values = read_part(source, name, outputs, dim)
    return values[:, None] if values.dim() == 1 else values.movedim(dim, 0)


def gptq_weights(source: TensorSource, section: Mapping[str, object]) -> dict[str, QuantizedWeight]:
    """Return GPTQ's weights by name. Raise `UserError` for another variant, naming the entry, and
    for missing tensors or wrong shapes.

    Early programs store a bias of zeros for each layer, which the model does not have. Such biases
    are skipped if all layers have them.

    Args:
        source: stored tensors.
        section: `quantization_config` of config.json.
    """
    specs = source.specs
    bits = _whole(section, "bits", (2, 3, 4, 8))
    group_size = _whole(section, "group_size")
    form = str(section.get("checkpoint_format") or "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise UserError(f"config.json: checkpoint_format {form!r} of GPTQ cannot be read")
    if section.get("dynamic"):
        raise UserError("config.json: GPTQ with other bits in some layers (dynamic) cannot be read")
    weights: dict[str, QuantizedWeight] = {}
    layers = _layers(specs, ".qweight")
    has_zero_biases = all(
        f"{layer}.bias" in specs and not source.read(f"{layer}.bias").any() for layer in layers
    )
    for layer in layers:
        words, outputs = _matrix(specs, f"{layer}.qweight")
        index = f"{layer}.g_idx"
        if section.get("desc_act") and index not in specs:
            raise UserError(f"{index}, the order of a weight's inputs (desc_act), is missing")
        inputs = specs[index].shape[0] if index in specs else words * _WORD_BITS // bits
        groups = 1 if group_size == -1 else ceil(inputs / group_size)
        _check(specs, f"{layer}.qweight", (ceil(inputs * bits / _WORD_BITS), outputs))
        _check(specs, f"{layer}.qzeros", (groups, ceil(outputs * bits / _WORD_BITS)))
        _check(specs, f"{layer}.scales", (groups, outputs))
        weights[f"{layer}.weight"] = _IntegerWeight(
            spec=TensorSpec(torch.Size((outputs, inputs)), specs[f"{layer}.scales"].dtype),
            values=_Packed(f"{layer}.qweight", bits, packed_dim=0, output_dim=1, size=inputs),
            zeros=_Packed(f"{layer}.qzeros", bits, packed_dim=1, output_dim=1, size=outputs),
            scale=f"{layer}.scales",
            scale_output_dim=1,
            group_size=inputs if group_size == -1 else group_size,
            groups=index if index in specs else "",
            zero_offset=1 if form == "gptq" else 0,
            is_scattered=groups > 1 and _is_scattered(source, index, group_size),
        )
        if has_zero_biases:
            weights[f"{layer}.weight"].stored += (f"{layer}.bias",)
    return weights


def awq_weights(
    specs: Mapping[str, TensorSpec], section: Mapping[str, object]
) -> dict[str, QuantizedWeight]:
    """Return AWQ's weights by name, see `gptq_weights`."""
    bits = _whole(section, "bits" if "bits" in section else "w_bit", (4,))
    group_size = _whole(section, "group_size" if "group_size" in section else "q_group_size")
    version = str(section.get("version") or "gemm").lower()
    if version != "gemm":
        raise UserError(f"config.json: version {version!r} of AWQ cannot be read, only gemm")
    weights: dict[str, QuantizedWeight] = {}
    for layer in _layers(specs, ".qweight"):
        inputs, words = _matrix(specs, f"{layer}.qweight")
        outputs = words * _WORD_BITS // bits
        groups = 1 if group_size == -1 else ceil(inputs / group_size)
        _check(specs, f"{layer}.qzeros", (groups, words))
        _check(specs, f"{layer}.scales", (groups, outputs))
        values, zeros = (
            _Packed(
                f"{layer}.{name}", bits, packed_dim=1, output_dim=1, size=outputs, order=_AWQ_ORDER
            )
            for name in ("qweight", "qzeros")
        )
        weights[f"{layer}.weight"] = _IntegerWeight(
            spec=TensorSpec(torch.Size((outputs, inputs)), specs[f"{layer}.scales"].dtype),
            values=values,
            zeros=zeros,
            scale=f"{layer}.scales",
            scale_output_dim=1,
            group_size=inputs if group_size == -1 else group_size,
        )
    return weights


def compressed_integer(
    source: TensorSource, layer: str, schemes: Sequence[Mapping[str, object]]
) -> QuantizedWeight:
    """Return the weight of a layer of compressed-tensors whose integers are packed or int8.

    Files of compressed-tensors before 0.18 hold integers of 3, 5, 6 and 7 bits without splitting
    them between words, and later ones under the same name do. The width of a row tells them apart.

    Args:
        source: stored tensors.
        layer: its name.
        schemes: entries `weights` of the groups in config.json; one of them is the layer's.

    Raises:
        UserError: a tensor is missing or has another shape, or several schemes fit.
    """
    specs = source.specs
    scale = f"{layer}.weight_scale"
    if scale not in specs:
        raise UserError(f"{layer}.weight is quantized, but its scale {scale} is missing")
    n_groups = specs[scale].shape[1] if len(specs[scale].shape) == 2 else 1
    read = _packed_integers if f"{layer}.weight_packed" in specs else _whole_integers
    found = read(source, layer, schemes, n_groups)
    sizes = {int(scheme.get("group_size") or -1) for scheme in found.fitting}
    if len(sizes) != 1:
        raise UserError(f"{scale} fits {len(sizes)} of the schemes in config.json")
    [group_size] = sizes
    outputs, inputs = found.shape
    index = f"{layer}.weight_g_idx"
    weight = _IntegerWeight(
        spec=TensorSpec(torch.Size((outputs, inputs)), specs[scale].dtype),
        values=found.values,
        zeros=found.zeros,
        scale=scale,
        scale_output_dim=0,
        group_size=group_size if n_groups > 1 else inputs,
        groups=index if index in specs else "",
        value_offset=found.offset,
        zero_offset=found.offset,
        is_scattered=n_groups > 1 and _is_scattered(source, index, group_size),
    )
    weight.stored = (*weight.stored, *found.others)
    return weight


class _Integers(NamedTuple):
    """The integers of a layer of compressed-tensors."""

    shape: tuple[int, int]
    """Outputs and inputs."""
    values: _Packed | str
    zeros: _Packed | str | None
    fitting: Sequence[Mapping[str, Any]]
    """Schemes of config.json that may be the layer's."""
    offset: int = 0
    """Added to packed integers and zero points."""
    others: tuple[str, ...] = ()
    """Further tensors of the layer."""


def _whole_integers(
    source: TensorSource, layer: str, schemes: Sequence[Mapping[str, object]], n_groups: int
) -> _Integers:
    """Return integers in int8."""
    outputs, inputs = _matrix(source.specs, f"{layer}.weight")
    zeros = f"{layer}.weight_zero_point"
    fitting = [scheme for scheme in schemes if _n_groups(scheme, inputs) == n_groups]
    return _Integers(
        (outputs, inputs), f"{layer}.weight", zeros if zeros in source.specs else None, fitting
    )


def _packed_integers(
    source: TensorSource, layer: str, schemes: Sequence[Mapping[str, object]], n_groups: int
) -> _Integers:
    """Return packed integers, in the only layout of the schemes that has the width of the rows."""
    specs, packed = source.specs, f"{layer}.weight_packed"
    outputs, inputs = _stored_shape(source, f"{layer}.weight_shape")
    n_words = specs[packed].shape[1]
    _check(specs, packed, (outputs, n_words))
    of_groups = [scheme for scheme in schemes if _n_groups(scheme, inputs) == n_groups]
    layouts = {
        (bits, dense)
        for bits in [_whole(scheme, "num_bits", _SIZES) for scheme in of_groups]
        for dense, width in _widths(bits, inputs).items()
        if width == n_words
    }
    if len(layouts) != 1:
        raise UserError(
            f"{packed} {list(specs[packed].shape)} fits {len(layouts)} of the schemes in "
            f"config.json, for a weight [{outputs}, {inputs}] with {n_groups} groups"
        )
    [(bits, dense)] = layouts
    zero_point = f"{layer}.weight_zero_point"
    zeros: _Packed | str | None = zero_point if zero_point in specs else None
    if zeros and specs[zero_point].dtype == torch.int32:
        zeros = _Packed(zero_point, bits, packed_dim=0, output_dim=0, size=outputs, dense=dense)
    return _Integers(
        shape=(outputs, inputs),
        values=_Packed(packed, bits, packed_dim=1, output_dim=0, size=inputs, dense=dense),
        zeros=zeros,
        fitting=[scheme for scheme in of_groups if scheme["num_bits"] == bits],
        offset=-(1 << (bits - 1)),
        others=(f"{layer}.weight_shape",),
    )


def _n_groups(scheme: Mapping[str, object], inputs: int) -> int:
    """Return the number of scales of a row."""
    group_size = scheme.get("group_size")
    return ceil(inputs / group_size) if isinstance(group_size, int) and group_size > 0 else 1


def _widths(bits: int, n: int) -> dict[bool, int]:
    """Return the words of n integers, dense and not; one entry if these are the same words."""
    widths = {True: ceil(n * bits / _WORD_BITS), False: ceil(n / (_WORD_BITS // bits))}
    if _WORD_BITS % bits == 0 or n <= _WORD_BITS // bits:
        widths.pop(False)
    return widths


def _stored_shape(source: TensorSource, name: str) -> tuple[int, int]:
    if name not in source.specs:
        raise UserError(f"{name}, the shape of a packed weight, is missing")
    shape = source.read(name).tolist()
    if len(shape) != 2 or min(shape) < 1:
        raise UserError(f"{name} is {shape}, but a weight has two dimensions")
    outputs, inputs = shape
    return outputs, inputs


def _layers(specs: Mapping[str, TensorSpec], ending: str) -> list[str]:
    return [name.removesuffix(ending) for name in specs if name.endswith(ending)]


def _matrix(specs: Mapping[str, TensorSpec], name: str) -> tuple[int, int]:
    if len(specs[name].shape) != 2:
        raise UserError(f"{name} {list(specs[name].shape)} must have two dimensions")
    first, second = specs[name].shape
    return first, second


def _check(specs: Mapping[str, TensorSpec], name: str, shape: tuple[int, int]) -> None:
    if name not in specs:
        raise UserError(f"{name}, which a quantized weight needs, is missing")
    if tuple(specs[name].shape) != shape:
        raise UserError(
            f"{name} is {list(specs[name].shape)}, but must be {list(shape)} by config.json"
        )


def _whole(section: Mapping[str, object], key: str, allowed: tuple[int, ...] | None = None) -> int:
    value = section.get(key)
    is_valid = type(value) is int and (value in allowed if allowed else value == -1 or value > 0)
    if not is_valid:
        words = (
            f"one of {', '.join(map(str, allowed))}" if allowed else "-1 or a whole number above 0"
        )
        raise UserError(f"config.json: {key} of the quantization is {value!r}, but must be {words}")
    assert isinstance(value, int)
    return value

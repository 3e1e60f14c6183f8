"""Frozen weights in few bits instead of a layer's parameters, and products with them. A weight is
unpacked for each product, forward and backward; results and gradients are the same as with the
unpacked weight.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.components.quantization import nf4
from torchtitan.components.quantization.narrow_products import placements_of_product
from torchtitan.components.weights.few_bits import FewBits, tables_of, unpack, unpack_rows
from torchtitan.protocols.experts import StackedExperts
from torchtitan.protocols.initializer import (
    Constant,
    DerivedRows,
    Initializer,
    initializers_of,
    with_initializers,
)
from torchtitan.protocols.model import ConvertedModule
from torchtitan.protocols.sharding import Features, with_features
from torchtitan.tools.autograd import Saved
from torchtitan.tools.device import multiplies
from torchtitan.tools.sharded import is_dtensor

_MOST_PARTS = 4
"""Parts of a form."""


class PackedLayer(ConvertedModule):
    """A mixin before a layer's class, which keeps some frozen parameters in few bits: a parameter
    becomes the parts of its `FewBits`, uint8 parameters with a prefix of its own."""

    forms: Mapping[str, FewBits] = {}
    """Parameter → its form."""
    prefixes: Mapping[str, str] = {}
    """Parameter → prefix of its parts' names."""
    is_transposed: bool = False
    """True if the plain parameters are (…, in, out); their parts have a row for each output, as of
    any weight."""

    def keep_packed(
        self, name: str, prefix: str, plain: Tensor, start: Initializer | None, form: FewBits
    ) -> dict[str, tuple[int, ...]]:
        """Register the parts of a parameter, with their initial values: quantized ones of `plain`
        for our NF4, otherwise the checkpoint's. Return the shapes of the parts."""
        self.forms = {**self.forms, name: form}
        self.prefixes = {**self.prefixes, name: prefix}
        starts: dict[str, Initializer] = {}
        by_rows = plain.mT if self.is_transposed else plain
        shapes = {part: form.part_shape(part, by_rows.shape) for part in form.parts}
        for part, shape in shapes.items():
            pack = partial(_packed_part, form, part, self.is_transposed)
            if form == nf4.FORM:
                values = getattr(nf4.pack(by_rows), part)
                rows = DerivedRows(name, plain.shape, start, pack)
            else:
                values = plain.new_empty(shape, dtype=torch.uint8)
                rows = DerivedRows(
                    name, plain.shape, Constant(0.0), pack, part=part, form=form.text
                )
            self.register_parameter(f"{prefix}{part}", nn.Parameter(values, requires_grad=False))
            starts[f"{prefix}{part}"] = rows
        with_initializers(self, **initializers_of(self), **starts)
        return shapes

    def parts_of(self, name: str) -> tuple[Tensor, ...]:
        """Return the parts of a parameter, in the order of its form."""
        return tuple(
            getattr(self, f"{self.prefixes[name]}{part}") for part in self.forms[name].parts
        )

    def unpacked(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a parameter in `dtype`; under tensor parallelism, each rank unpacks its shard."""
        form, parts = self.forms[name], self.parts_of(name)
        packed = parts[0]
        if not is_dtensor(packed):
            return unpack(form, parts, dtype)
        from torch.distributed.tensor import DTensor

        shape = torch.Size((*packed.shape[:-1], form.width(packed)))
        local = unpack(form, [part.to_local() for part in parts], dtype)  # type: ignore[attr-defined]
        return DTensor.from_local(
            local,
            packed.device_mesh,
            packed.placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )

    def plain_base(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `own` parameters with unpacked ones, float32, instead of their parts."""
        names = {
            name: [f"{self.prefixes[name]}{part}" for part in form.parts]
            for name, form in self.forms.items()
        }
        taken = {part for parts in names.values() for part in parts}
        plain = {
            name: unpack(form, [own[part] for part in names[name]], torch.float32)
            for name, form in self.forms.items()
        }
        if self.is_transposed:
            plain = {name: values.mT for name, values in plain.items()}
        return {**{name: own[name] for name in own if name not in taken}, **plain}

    def plain_state(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.plain_base(own)

    def plain_types(self, own: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
        """Return the types that are exact for values in few bits; others keep their types."""
        types = {name: tensor.dtype for name, tensor in self.plain_base(own).items()}
        return types | {name: form.value_dtype for name, form in self.forms.items()}


class PackedLinear(PackedLayer, nn.Linear):
    """A frozen linear layer with its `weight` in few bits."""

    def __init__(self, linear: nn.Linear, form: FewBits):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)
        starts = initializers_of(linear)
        with_initializers(self, **{name: starts[name] for name in starts if name == "bias"})
        pack_linear(self, linear.weight, starts.get("weight"), form)

    def effective_weight(self) -> Tensor:
        return self.unpacked("weight", self.forms["weight"].value_dtype)

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.forms["weight"], self.parts_of("weight"), self.bias)


def pack_linear(
    layer: PackedLayer, plain: Tensor, start: Initializer | None, form: FewBits
) -> None:
    """Keep the weight of a linear layer in few bits, with the features of each part for tensor
    parallelism."""
    shapes = layer.keep_packed("weight", "", plain, start, form)
    for part, shape in shapes.items():
        second: Features = "in" if form.follows_inputs(part, plain.shape[1]) else None
        with_features(layer, **{part: ("out", second, *(None,) * (len(shape) - 2))})


class PackedExperts(PackedLayer, StackedExperts):
    """A mixin before a class of experts, which keeps some of their `matrices` in few bits: `w` as
    `w_packed`, `w_scales`, …."""

    calls_product = True

    def product(self, rows_RI: Tensor, name: str, ends_E: Tensor) -> Tensor:
        if name not in self.forms:
            return super().product(rows_RI, name, ends_E)
        parts = self.parts_of(name)
        device = self.device_type or rows_RI.device.type
        rows: Tensor = _GroupedProduct.apply(rows_RI, ends_E, self.forms[name], device, *parts)
        return rows


def pack_experts(experts: StackedExperts, forms: Mapping[str, FewBits]) -> None:
    """Freeze experts and keep the matrices in `forms` in few bits, in place: they become
    `PackedExperts` of their class."""
    experts.requires_grad_(False)
    starts = initializers_of(experts)
    weights = {name: experts.get_parameter(name) for name in forms}
    experts.__class__ = type(f"Packed{type(experts).__name__}", (PackedExperts, type(experts)), {})
    assert isinstance(experts, PackedExperts)
    with_initializers(experts, **{name: starts[name] for name in starts if name not in forms})
    split_dims = dict(experts.hidden_dims)
    for name, form in forms.items():
        plain, hidden_dim = weights[name], split_dims.pop(name)
        assert hidden_dim is None or not experts.is_transposed
        delattr(experts, name)
        for part in experts.keep_packed(name, f"{name}_", plain, starts.get(name), form):
            is_whole = hidden_dim == plain.ndim - 1 and not form.follows_inputs(
                part, plain.shape[-1]
            )
            split_dims[f"{name}_{part}"] = None if is_whole else hidden_dim
    experts.hidden_dims = split_dims


def packed_linear(
    x: Tensor, form: FewBits, parts: Sequence[Tensor], bias: Tensor | None = None
) -> Tensor:
    """Return `x (…, in)` times the transpose of a weight in few bits, plus a bias, (…, out), with
    gradients for `x` and the bias. Under tensor parallelism, each rank multiplies its shard of the
    weight."""
    packed = parts[0]
    if not is_dtensor(packed):
        return _multiply(x, form, parts, bias)
    from torch.distributed.tensor import DTensor

    assert is_dtensor(x)
    _, of_gradient, of_y = placements_of_product(x, packed)
    local_x = x.to_local(grad_placements=[of_gradient])
    local_parts = [part.to_local() for part in parts]  # type: ignore[attr-defined]
    local_y = _multiply(local_x, form, local_parts, None)
    product = DTensor.from_local(local_y, packed.device_mesh, [of_y], run_check=False)
    return product if bias is None else product + bias


def _multiply(x: Tensor, form: FewBits, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    # Four, since the compiler confuses the arguments of functions with any number of them.
    four = (*parts, *(None,) * (_MOST_PARTS - len(parts)))
    y: Tensor = _Product.apply(x, form, bias, *four)
    return y


class _Kept(Saved, Protocol):
    form: FewBits


class _KeptRows(_Kept, Protocol):
    device: str


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept,
        x: Tensor,
        form: FewBits,
        bias: Tensor | None,
        packed: Tensor,
        scales: Tensor,
        third: Tensor | None,
        fourth: Tensor | None,
    ) -> Tensor:
        parts = [part for part in (packed, scales, third, fourth) if part is not None]
        ctx.form = form
        ctx.save_for_backward(*parts)
        return F.linear(x, _unpack_for_product(form, parts, x.dtype), bias)

    @staticmethod
    def backward(ctx: _Kept, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        packed, *others = ctx.saved_tensors
        if torch.compiler.is_compiling():
            packed = _copy_after(packed, gradient)
        weight = _unpack_for_product(ctx.form, (packed, *others), gradient.dtype)
        # The product adds the bias, since a separate sum would round once more than `F.linear`.
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ weight, None, of_bias, *(None,) * _MOST_PARTS


class _GroupedProduct(torch.autograd.Function):
    """Rows times the matrices of their experts. A GPU unpacks all experts of the layer for one
    grouped product, without waiting for the numbers of rows; a CPU unpacks one expert at a time."""

    @staticmethod
    def forward(
        ctx: _KeptRows, rows_RI: Tensor, ends_E: Tensor, form: FewBits, device: str, *parts: Tensor
    ) -> Tensor:
        ctx.form, ctx.device = form, device
        ctx.save_for_backward(ends_E, *parts)
        return _grouped(rows_RI, ends_E, form, device, parts, is_transposed=True)

    @staticmethod
    def backward(ctx: _KeptRows, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ends_E, *parts = ctx.saved_tensors
        gradient = _grouped(
            gradients[0].contiguous(), ends_E, ctx.form, ctx.device, parts, is_transposed=False
        )
        return gradient, *(None,) * (3 + len(parts))


def _grouped(
    rows: Tensor,
    ends_E: Tensor,
    form: FewBits,
    device: str,
    parts: Sequence[Tensor],
    *,
    is_transposed: bool,
) -> Tensor:
    """Return the products of rows with the matrices (outputs, inputs) of their experts, or with the
    transposed ones."""
    if device != "cpu":
        matrices = _unpack_for_product(form, parts, rows.dtype).flatten(1, -2)
        return F.grouped_mm(rows, matrices.mT if is_transposed else matrices, offs=ends_E)
    width = form.width(parts[0])
    n_outputs = parts[0].shape[1:-1].numel()
    result = rows.new_empty(len(rows), n_outputs if is_transposed else width)
    dtype = rows.dtype if multiplies(rows.dtype) else torch.float32
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            matrix = unpack(form, [part[expert] for part in parts], rows.dtype).flatten(0, -2)
            matrix = (matrix.T if is_transposed else matrix).to(dtype)
            result[start:end] = rows[start:end].to(dtype) @ matrix
        start = end
    return result


def _unpack_for_product(form: FewBits, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    packed = parts[0]
    if not packed.is_cuda or torch.compiler.is_compiling():
        return unpack(form, parts, dtype)
    *rows, _ = packed.shape
    flat = [part.flatten(0, len(rows) - 1) for part in parts]
    values = compiled_unpack(form)(tables_of(form, packed.device), *flat)
    return values.to(dtype).view(*rows, values.shape[-1])


@functools.cache
def compiled_unpack(form: FewBits) -> Callable[..., Tensor]:
    """Return `unpack_rows` of a form as one kernel for any size. Checkpointing policies do not see
    it, so that they never keep its result."""
    return torch.compile(
        partial(unpack_rows, form), dynamic=True, options={"wrap_inductor_compiled_regions": False}
    )


def _packed_part(form: FewBits, part: str, is_transposed: bool, plain: Tensor) -> Tensor:
    """Return a part of a weight, from its values for our NF4, otherwise from the part of the
    checkpoint's (`TensorSource.of_part`)."""
    rows = plain.mT if is_transposed else plain
    tensor: Tensor = (
        getattr(nf4.pack(rows), part) if form == nf4.FORM else form.pack_part(part, rows)
    )
    return tensor


@torch.library.custom_op("torchtitan::copy_after", mutates_args=())
def _copy_after(tensor: Tensor, earlier: Tensor) -> Tensor:
    """Return a copy of `tensor` that depends on `earlier`. Otherwise, the compiler would unpack a
    weight only once, in the forward pass, and keep it for the backward pass."""
    return tensor.clone()


@_copy_after.register_fake
def _(tensor: Tensor, earlier: Tensor) -> Tensor:
    return torch.empty_like(tensor)

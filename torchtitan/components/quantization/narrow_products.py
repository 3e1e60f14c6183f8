"""The three products of a linear layer with both operands in a block format (`block_formats`).

N tokens, I inputs, O outputs. Each product sums over blocks, so each operand is cast along another
dimension in each product. Products of the narrow values are exact in float32; their sums, and the
rounding of the result to the type of the inputs, are not.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.components.quantization.block_formats import (
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    Blocks,
    float8_rows,
    hadamard,
    mxfp8,
    nvfp4,
    padded,
    unpack_e2m1,
)
from torchtitan.protocols.experts import StackedExperts
from torchtitan.tools.autograd import Context
from torchtitan.tools.sharded import is_dtensor
from torchtitan.tools.torch_private import FakeTensor, make_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


class Products(Protocol):
    """The products of a layer. `group`: ranks with other parts of a sharded weight."""

    def multiply(
        self, x_NI: Tensor, weight_OI: Tensor, group: ProcessGroup | None = None
    ) -> Tensor:
        """Return `x weightᵀ` (N, O), with gradients."""

    def multiply_experts(
        self, rows_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor, group: ProcessGroup | None
    ) -> Tensor:
        """Return the products (R, O) of rows with the matrices of their experts."""


class EmulatedProducts:
    """Casts of a recipe, computed with PyTorch's operations; products of pairs of `Blocks` in
    float32."""

    def forward_operands(
        self, x_NI: Tensor, weight_OI: Tensor, group: ProcessGroup | None
    ) -> tuple[Blocks, Blocks]:
        """Return (N, I) and (O, I)."""
        raise NotImplementedError

    def input_gradient_operands(
        self, gradient_NO: Tensor, weight_OI: Tensor, group: ProcessGroup | None
    ) -> tuple[Blocks, Blocks]:
        """Return (N, O) and (I, O)."""
        raise NotImplementedError

    def weight_gradient_operands(
        self, gradient_NO: Tensor, x_NI: Tensor, group: ProcessGroup | None
    ) -> tuple[Blocks, Blocks] | None:
        """Return (O, N) and (I, N), with N padded to whole blocks; None: this product is not
        narrow."""
        raise NotImplementedError

    def multiply(
        self, x_NI: Tensor, weight_OI: Tensor, group: ProcessGroup | None = None
    ) -> Tensor:
        y_NO: Tensor = _Emulated.apply(x_NI, weight_OI, self, group)
        return y_NO

    def multiply_experts(
        self, rows_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor, group: ProcessGroup | None
    ) -> Tensor:
        """Waits for the numbers of rows. Blocks along rows end with the expert's rows."""
        counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
        parts = zip(rows_RI.split(counts), weight_EOI.unbind(0), strict=True)
        return torch.cat([self.multiply(rows, weight, group) for rows, weight in parts])


class Float8Products(EmulatedProducts):
    """Rows along the sum of each product, as in torchao's products of experts. Ranks that divide
    rows have scales of their own."""

    def forward_operands(
        self, x_NI: Tensor, weight_OI: Tensor, group: ProcessGroup | None
    ) -> tuple[Blocks, Blocks]:
        return float8_rows(x_NI), float8_rows(weight_OI)

    def input_gradient_operands(
        self, gradient_NO: Tensor, weight_OI: Tensor, group: ProcessGroup | None
    ) -> tuple[Blocks, Blocks]:
        return float8_rows(gradient_NO), float8_rows(weight_OI.T)

    def weight_gradient_operands(
        self, gradient_NO: Tensor, x_NI: Tensor, group: ProcessGroup | None
    ) -> tuple[Blocks, Blocks] | None:
        return float8_rows(gradient_NO.T), float8_rows(x_NI.T)


@dataclass(frozen=True)
class MXFP8Products(EmulatedProducts):
    """Blocks of 32 along the sum of each product, as in torchao's recipes."""

    wide_weight_gradient: bool = False
    """Leave the operands of the weight's gradient in their type."""

    def forward_operands(
        self, x_NI: Tensor, weight_OI: Tensor, group: ProcessGroup | None
    ) -> tuple[Blocks, Blocks]:
        return mxfp8(x_NI), mxfp8(weight_OI)

    def input_gradient_operands(
        self, gradient_NO: Tensor, weight_OI: Tensor, group: ProcessGroup | None
    ) -> tuple[Blocks, Blocks]:
        return mxfp8(gradient_NO), mxfp8(weight_OI.T)

    def weight_gradient_operands(
        self, gradient_NO: Tensor, x_NI: Tensor, group: ProcessGroup | None
    ) -> tuple[Blocks, Blocks] | None:
        if self.wide_weight_gradient:
            return None
        return mxfp8(padded(gradient_NO.T, MXFP8_BLOCK)), mxfp8(padded(x_NI.T, MXFP8_BLOCK))


@dataclass(frozen=True)
class NVFP4Products(EmulatedProducts):
    """The recipe of arXiv:2509.25149, section 4: weights in blocks of 16 × 16, so that both
    products round them equally; stochastic rounding of gradients; random Hadamard transforms of
    both operands of the weight's gradient."""

    stochastic: bool = True
    transforms: bool = True

    def forward_operands(
        self, x_NI: Tensor, weight_OI: Tensor, group: ProcessGroup | None
    ) -> tuple[Blocks, Blocks]:
        return nvfp4(x_NI, group=group), _square_blocks(weight_OI, group)

    def input_gradient_operands(
        self, gradient_NO: Tensor, weight_OI: Tensor, group: ProcessGroup | None
    ) -> tuple[Blocks, Blocks]:
        gradient = nvfp4(gradient_NO, stochastic=self.stochastic, group=group)
        return gradient, _square_blocks(weight_OI, group, transposed=True)

    def weight_gradient_operands(
        self, gradient_NO: Tensor, x_NI: Tensor, group: ProcessGroup | None
    ) -> tuple[Blocks, Blocks] | None:
        gradient_ON, x_IN = (padded(each.T, NVFP4_BLOCK) for each in (gradient_NO, x_NI))
        if self.transforms:
            gradient_ON, x_IN = hadamard(gradient_ON), hadamard(x_IN)
        gradient = nvfp4(gradient_ON, stochastic=self.stochastic, group=group)
        return gradient, nvfp4(x_IN, group=group)


class NVFP4Weight(Tensor):
    """A weight (O, I) cast to NVFP4 in blocks of 16 x 16, as bytes (`narrow_gathers`): `packed` (O,
    I / 2), `squares` (O / 16, I / 16), and `tensor_scale` (). Its gradient is of type `dtype`."""

    @staticmethod
    def __new__(
        cls, packed: Tensor, squares: Tensor, tensor_scale: Tensor, dtype: torch.dtype
    ) -> "NVFP4Weight":
        shape = (len(packed), 2 * packed.shape[1])
        weight: NVFP4Weight = make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        return weight

    def __init__(
        self, packed: Tensor, squares: Tensor, tensor_scale: Tensor, dtype: torch.dtype
    ) -> None:
        self.packed = packed
        self.squares = squares
        self.tensor_scale = tensor_scale

    def blocks(self, transposed: bool) -> Blocks:
        """Return the blocks of the weight (O, I), or of its transpose (I, O)."""
        elements = unpack_e2m1(self.packed)
        squares = self.squares.view(torch.float8_e4m3fn).float()
        if transposed:
            elements, squares = elements.T, squares.T
        return Blocks(elements, squares.repeat_interleave(NVFP4_BLOCK, 0), self.tensor_scale)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with the class
        cls, operation: object, types: object, args: Any = (), kwargs: object = None
    ) -> object:
        """Return the same weight from what FSDP and autograd do with it; nothing else can."""
        aten, (own, *_) = torch.ops.aten, args
        same = (aten.detach.default, aten.as_strided.default, aten.view.default)
        shape = torch.Size(args[1]) if len(args) > 1 else own.shape
        if operation not in same or shape != own.shape:
            raise NotImplementedError(f"{operation} of a weight in NVFP4")
        return NVFP4Weight(own.packed, own.squares, own.tensor_scale, own.dtype)


def _square_blocks(
    weight_OI: Tensor, group: ProcessGroup | None, transposed: bool = False
) -> Blocks:
    """Return a weight in blocks of 16 x 16, or its transpose."""
    if isinstance(weight_OI, NVFP4Weight):
        return weight_OI.blocks(transposed)
    return nvfp4(weight_OI.T if transposed else weight_OI, square_blocks=True, group=group)


class NarrowLinear(nn.Linear):
    """A linear layer that multiplies with `products`. It keeps the parameters of the plain
    layer."""

    def __init__(self, linear: nn.Linear, products: Products, part_multiple: int):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.products = products
        self.part_multiple = part_multiple
        """Divisor of the inputs and outputs of a rank."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, I) to (…, O)."""
        return narrow_linear(self.products, x, self.weight, self.bias)


def narrow_linear(products: Products, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x weightᵀ + bias`, (…, I) to (…, O). Under tensor parallelism, each rank multiplies
    its shard."""
    multiply = _multiply_shards if is_dtensor(x) else _multiply
    y = multiply(products, x, weight)
    return y if bias is None else y + bias


def _multiply(
    products: Products, x: Tensor, weight: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    if isinstance(x, FakeTensor):  # a dry run counts the products of a device that has them
        return F.linear(x, weight)
    y_NO = products.multiply(x.reshape(-1, x.shape[-1]), weight, group)
    return y_NO.view(*x.shape[:-1], y_NO.shape[-1])


def _multiply_shards(products: Products, x: Tensor, weight: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    assert is_dtensor(x) and is_dtensor(weight)
    (of_weight,) = weight.placements
    _, of_gradient, of_y = placements_of_product(x, weight)
    group = None if of_weight.is_replicate() else weight.device_mesh.get_group()
    y = _multiply(products, x.to_local(grad_placements=[of_gradient]), weight.to_local(), group)
    return DTensor.from_local(y, weight.device_mesh, [of_y], run_check=False)


def placements_of_product(x: Tensor, weight: Tensor) -> "tuple[Placement, Placement, Placement]":
    """Return the placements of the input x, its gradient and the output of a linear layer under
    tensor parallelism, by the shard of its weight."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    assert is_dtensor(x) and is_dtensor(weight)
    (of_weight,), last = weight.placements, Shard(x.ndim - 1)
    of_product: tuple[Placement, Placement, Placement] = {
        Shard(0): (Replicate(), Partial(), last),
        Shard(1): (last, last, Partial()),
        Replicate(): (Replicate(), Replicate(), Replicate()),
    }[of_weight]
    assert x.placements == of_product[:1], f"{x.placements} times {weight.placements}"
    return of_product


class NarrowExperts(StackedExperts):
    """A mixin before a class of experts, which multiplies their `matrices` with `products`."""

    products: Products
    calls_product = True

    def product(self, rows_RI: Tensor, name: str, ends_E: Tensor) -> Tensor:
        if isinstance(rows_RI, FakeTensor):
            return super().product(rows_RI, name, ends_E)
        weight_EOI = getattr(self, name).flatten(1, -2)
        return self.products.multiply_experts(rows_RI, weight_EOI, ends_E, self.width_group)


def narrow_experts(
    experts: StackedExperts, products: Products, part_multiple: int
) -> NarrowExperts:
    """Make experts multiply with `products`, in place, and return them."""
    kind = type(f"Narrow{type(experts).__name__}", (NarrowExperts, type(experts)), {})
    experts.__class__ = kind
    assert isinstance(experts, NarrowExperts)
    experts.products, experts.part_multiple = products, part_multiple
    return experts


class _Kept(Context, Protocol):
    saved_tensors: tuple[Tensor, Tensor]
    products: EmulatedProducts
    group: ProcessGroup | None


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept,
        x_NI: Tensor,
        weight_OI: Tensor,
        products: EmulatedProducts,
        group: ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.products, ctx.group = products, group
        if not x_NI.numel():  # an expert without tokens; nothing has a largest value
            return x_NI.new_zeros(len(x_NI), len(weight_OI))
        return _product(*products.forward_operands(x_NI, weight_OI, group)).to(x_NI.dtype)

    @staticmethod
    def backward(ctx: _Kept, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_NO,), (x_NI, weight_OI) = gradients, ctx.saved_tensors
        products, group = ctx.products, ctx.group
        if not x_NI.numel():
            return torch.zeros_like(x_NI), torch.zeros_like(weight_OI), None, None
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            operands = products.input_gradient_operands(gradient_NO, weight_OI, group)
            grad_x = _product(*operands).to(x_NI.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = products.weight_gradient_operands(gradient_NO, x_NI, group)
            grad_weight = _product(*of_weight) if of_weight else gradient_NO.T @ x_NI
            grad_weight = grad_weight.to(weight_OI.dtype)
        return grad_x, grad_weight, None, None


def _product(a: Blocks, b: Blocks) -> Tensor:
    """Return `a bᵀ` in float32."""
    return (a.operand() @ b.operand().T) * (a.tensor_scale * b.tensor_scale)

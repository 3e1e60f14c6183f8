"""Routed experts: many small gated networks, of which each token passes through a few.

N tokens, K experts for each, E experts in all, H their width. A pair is a token with one of its experts; R = N K pairs
are computed in the order of experts. No pair is dropped, and no memory is set aside for more.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.protocols.experts import StackedExperts
from torchtitan.protocols.initializer import Constant, TruncatedNormal, with_initializers

Gated = Callable[[Tensor, Tensor], Tensor]
"""Activation of a gated network, from the results of both halves of w13, the gate first."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up` (arXiv:2002.05202)."""
    return F.silu(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return the activation of gpt-oss: both inputs are limited to 7, the gate only from above."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class Pairs(NamedTuple):
    """Pairs in the order of experts."""

    token_R: Tensor
    """Token of each pair."""
    expert_R: Tensor
    """Expert of each pair, rising."""
    place_NK: Tensor
    """Place of a token's pairs in this order."""
    slot_R: Tensor
    """Place of each pair in the order of tokens."""

    @classmethod
    def of(cls, chosen_NK: Tensor) -> "Pairs":
        expert_R, slot_R = chosen_NK.flatten().sort(stable=True)
        place_R = torch.empty_like(slot_R)
        place_R[slot_R] = torch.arange(len(slot_R), device=slot_R.device)
        return cls(slot_R // chosen_NK.shape[1], expert_R, place_R.view_as(chosen_NK), slot_R)

    def ends_E(self, n_experts: int) -> Tensor:
        """Return the end of each expert's pairs, int32. A search, since counting would wait for a GPU."""
        experts_E = torch.arange(n_experts, device=self.expert_R.device)
        return torch.searchsorted(self.expert_R, experts_E, right=True, out_int32=True)

    def of_experts(self, n_experts: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the rows of each expert in tensors with a row for each pair; waits for the sizes."""
        sizes = self.expert_R.bincount(minlength=n_experts).tolist()
        return zip(*(tensor.split(sizes) for tensor in tensors), strict=True)


class RoutedExperts(StackedExperts):
    """Gated networks `w2(activation(gate x, up x))` with stacked weights: `w13` (E, 2, H, dim), the gate and up of each
    expert, and `w2` (E, dim, H). With `bias`: `bias13` (E, 2, H), `bias2` (E, dim). `top_k`: experts of a token."""

    matrices = ("w13", "w2")
    hidden_dims = {"w13": 2, "w2": 2, "bias13": 2}

    bias13: nn.Parameter | None
    bias2: nn.Parameter | None

    def __init__(
        self,
        *,
        n_experts: int,
        top_k: int,
        dim: int,
        hidden_dim: int,
        activation: Gated = swiglu,
        bias: bool = False,
        init_std: float,
        out_init_std: float,
    ):
        super().__init__()
        self.activation = activation
        self.n_experts = n_experts
        self.active_fraction = top_k / n_experts
        """Part of the weights that multiplies a token, for the count of operations (`count_elements`)."""
        self.device_type: str | None = None
        """Device whose algorithm is used. None: the tokens' device."""
        self.w13 = nn.Parameter(torch.empty(n_experts, 2, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        for name, weight in {"bias13": self.w13, "bias2": self.w2}.items():
            self.register_parameter(name, nn.Parameter(torch.empty(weight.shape[:-1])) if bias else None)
        stds = {"w13": TruncatedNormal(init_std), "w2": TruncatedNormal(out_init_std)}
        biases = {name: Constant(0.0) for name in ("bias13", "bias2")} if bias else {}
        with_initializers(self, **stds, **biases)

    def forward(self, x_ND: Tensor, weights_NK: Tensor, chosen_NK: Tensor) -> Tensor:
        if self.exchange is None:
            return self._compute(x_ND, weights_NK, chosen_NK)
        pairs = Pairs.of(chosen_NK)
        weight_R = weights_NK.flatten().gather(0, pairs.slot_R)
        rows_RD = _Gathered.apply(x_ND, pairs.token_R, pairs.place_NK)
        ends_E = pairs.ends_E(self.n_experts)
        out_RD = self.exchange(rows_RD, weight_R, ends_E.diff(prepend=ends_E.new_zeros(1)), self._compute)
        result: Tensor = _Summed.apply(out_RD, pairs.token_R, pairs.place_NK)
        return result

    def _compute(self, x_ND: Tensor, weights_NK: Tensor, chosen_NK: Tensor) -> Tensor:
        """Compute with the experts of this rank, which `chosen_NK` numbers from 0."""
        pairs = Pairs.of(chosen_NK)
        weight_R = weights_NK.flatten().gather(0, pairs.slot_R)
        bias13 = None if self.bias13 is None else self.bias13.flatten(1)
        if (self.device_type or x_ND.device.type) == "cpu":
            parameters = (self.w13.flatten(1, 2), self.w2, bias13, self.bias2)
            result: Tensor = _OneByOne.apply(x_ND, weight_R, *parameters, pairs, self.activation)
            return result
        product = functools.partial(self.product, ends_E=pairs.ends_E(len(self.w13)))
        return _grouped(x_ND, weight_R, product, bias13, self.bias2, pairs, self.activation)


class InputScaledExperts(RoutedExperts):
    """Experts of which each gets the token times its weight, and whose results are added as they are (Llama 4)."""

    def forward(self, x_ND: Tensor, weights_NK: Tensor, chosen_NK: Tensor) -> Tensor:
        scaled = (x_ND[:, None] * weights_NK[..., None].to(x_ND.dtype)).flatten(0, 1)
        ones = torch.ones_like(weights_NK).view(-1, 1)
        return super().forward(scaled, ones, chosen_NK.view(-1, 1)).unflatten(0, weights_NK.shape).sum(dim=1)


def _grouped(
    x_ND: Tensor,
    weight_R: Tensor,
    product: Callable[[Tensor, str], Tensor],
    bias13: Tensor | None,
    bias2: Tensor | None,
    pairs: Pairs,
    activation: Gated,
) -> Tensor:
    """Compute all experts in a `product` each with w13 and w2, without reading a size from the device."""
    both_RH = product(_Gathered.apply(x_ND, pairs.token_R, pairs.place_NK), "w13")
    both_RH = both_RH if bias13 is None else both_RH + bias13[pairs.expert_R]
    hidden_RH = activation(*both_RH.chunk(2, dim=1))
    # The weight multiplies the narrower side of w2.
    out_RD = product((hidden_RH * weight_R[:, None]).to(x_ND.dtype), "w2")
    if bias2 is not None:
        out_RD = out_RD + (bias2[pairs.expert_R] * weight_R[:, None]).to(x_ND.dtype)
    result: Tensor = _Summed.apply(out_RD, pairs.token_R, pairs.place_NK)
    return result


class _Gathered(torch.autograd.Function):
    """Rows of the pairs' tokens: `x[token_R]`. The gradient adds a token's K rows in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, token_R: Tensor, place_NK: Tensor) -> Tensor:
        ctx.save_for_backward(place_NK)
        return x_ND[token_R]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (place_NK,) = ctx.saved_tensors
        return _sum_rows(grad_outputs[0], place_NK), None, None


class _Summed(torch.autograd.Function):
    """The sum of a token's K rows, in a fixed order; the opposite of `_Gathered`."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, token_R: Tensor, place_NK: Tensor) -> Tensor:
        ctx.save_for_backward(token_R)
        return _sum_rows(rows_RD, place_NK)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (token_R,) = ctx.saved_tensors
        return grad_outputs[0][token_R], None, None


def _sum_rows(rows_RD: Tensor, place_NK: Tensor) -> Tensor:
    # Reads and adds in one pass, in float32 for lower precisions.
    return F.embedding_bag(place_NK, rows_RD, mode="sum")


class _OneByOne(torch.autograd.Function):
    """One expert after the other, for CPUs: its tokens, weights and results stay in the core's cache from the first
    product to the last. Types that the CPU cannot multiply are multiplied in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_R: Tensor,
        w13: Tensor,
        w2: Tensor,
        bias13: Tensor | None,
        bias2: Tensor | None,
        pairs: Pairs,
        activation: Gated,
    ) -> Tensor:
        dtype, both_RH = _product_type(x_ND.dtype), x_ND.new_empty(len(weight_R), w13.shape[1])
        out_RD = x_ND.new_empty(len(weight_R), x_ND.shape[1])
        rows = pairs.of_experts(len(w13), pairs.token_R, weight_R[:, None].to(dtype), both_RH, out_RD)
        for e, (tokens, weight, both, out) in enumerate(rows):
            if len(tokens) > 0:
                x = x_ND.index_select(0, tokens).to(dtype)
                _product(x, w13[e].T, both, None if bias13 is None else bias13[e])
                hidden = activation(*both.to(dtype).chunk(2, dim=1)) * weight
                _product(hidden, w2[e].T, out, None if bias2 is None else bias2[e] * weight)
        ctx.save_for_backward(x_ND, weight_R, w13, w2, bias13, bias2, both_RH, *pairs)
        ctx.activation = activation
        return _sum_rows(out_RD, pairs.place_NK)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_R, w13, w2, bias13, bias2, both_RH, *saved = ctx.saved_tensors
        dtype, pairs, (grad_ND,) = _product_type(x_ND.dtype), Pairs(*saved), grad_outputs
        grads: list[Any] = [None if weight is None else torch.empty_like(weight) for weight in (w13, w2, bias13, bias2)]
        grad_w13, grad_w2, grad_bias13, grad_bias2 = grads
        grad_weight_R, grad_x_RD = torch.empty_like(weight_R), x_ND.new_empty(len(weight_R), x_ND.shape[1])
        rows = pairs.of_experts(len(w13), pairs.token_R, weight_R[:, None].to(dtype), both_RH, grad_weight_R, grad_x_RD)
        for e, (tokens, weight, both, grad_weight, grad_x) in enumerate(rows):
            x, grad = (rows.index_select(0, tokens).to(dtype) for rows in (x_ND, grad_ND))
            grad_hidden = grad @ w2[e].to(dtype)
            hidden, grad_both = _activation_backward(ctx.activation, both.to(dtype), grad_hidden * weight)
            torch.sum(grad_hidden * hidden, dim=1, dtype=weight_R.dtype, out=grad_weight)
            if bias2 is not None:
                grad_bias13[e], grad_bias2[e] = grad_both.sum(dim=0), (grad * weight).sum(dim=0)
                grad_weight += grad @ bias2[e].to(dtype)
            _product(grad_both.T, x, grad_w13[e])
            _product(grad.T, hidden * weight, grad_w2[e])
            _product(grad_both, w13[e], grad_x)
        return _sum_rows(grad_x_RD, pairs.place_NK), grad_weight_R, *grads, None, None


def _activation_backward(activation: Gated, both: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of an activation, and the gradient of `both` its inputs from the gradient of its result."""
    if activation is swiglu:  # as below, but without the cost of autograd for each expert
        gate, up = both.chunk(2, dim=1)
        gated = F.silu(gate)
        return gated * up, torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * gated), dim=1)
    both = both.detach().requires_grad_()
    with torch.enable_grad():
        result = activation(*both.chunk(2, dim=1))
    return result.detach(), torch.autograd.grad(result, both, grad)[0]


@functools.cache
def _product_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which this CPU multiplies matrices of a type fastest."""
    has = torch.cpu.get_capabilities()
    is_native = dtype == torch.bfloat16 and (has.get("avx512_bf16") or has.get("amx_bf16"))
    return dtype if is_native else torch.float32


def _product(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """Write `a @ b + bias` into `out`, in the type of `a`."""
    result = out if out.dtype == a.dtype else torch.empty_like(out, dtype=a.dtype)
    if bias is None:
        torch.mm(a, b.to(a.dtype), out=result)
    else:
        torch.addmm(bias.to(a.dtype), a, b.to(a.dtype), out=result)
    if result is not out:
        out.copy_(result)

"""Routed experts: many small gated networks. Each token passes through a few of them.

N tokens, K experts for each, E experts in all, H their width. A pair is a token with one of its
experts; R = N K pairs are computed in the order of experts. No pair is dropped, and no spare memory
is allocated.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.common.feed_forward import gelu_tanh, squared_relu
from torchtitan.protocols.experts import Exchange, StackedExperts
from torchtitan.protocols.initializer import Constant, TruncatedNormal, with_initializers
from torchtitan.tools.autograd import Saved
from torchtitan.tools.device import multiplies


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up` (arXiv:2002.05202)."""
    return F.silu(gate) * up


class Pairs(NamedTuple):
    """Token, expert and weight of each pair in the order of experts, and the places of each token's
    pairs."""

    token_R: Tensor
    expert_R: Tensor
    weight_R: Tensor
    place_NK: Tensor

    @classmethod
    def of(cls, weights_NK: Tensor, chosen_NK: Tensor) -> "Pairs":
        expert_R, slot_R = chosen_NK.flatten().int().sort(stable=True)  # faster than int64
        places_R = torch.arange(len(slot_R), device=slot_R.device)
        place_NK = torch.empty_like(slot_R).scatter_(0, slot_R, places_R).view_as(chosen_NK)
        return cls(
            slot_R // chosen_NK.shape[1], expert_R, weights_NK.flatten().gather(0, slot_R), place_NK
        )

    def ends_E(self, n_experts: int) -> Tensor:
        """Return the end of each expert's pairs, int32, by a search: counting would wait for a
        GPU."""
        experts_E = torch.arange(n_experts, dtype=torch.int32, device=self.expert_R.device)
        return torch.searchsorted(self.expert_R, experts_E, right=True, out_int32=True)

    def of_experts(self, n_experts: int, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield tokens, weights (…, 1) and `rows` of the pairs of each expert; waits for their
        numbers."""
        sizes = self.expert_R.bincount(minlength=n_experts).tolist()
        weight_R1 = self.weight_R[:, None].to(rows[0].dtype)
        return zip(*(each.split(sizes) for each in (self.token_R, weight_R1, *rows)), strict=True)

    def rows_of(self, x_ND: Tensor) -> Tensor:
        """Return the rows (R, D) of the pairs' tokens."""
        return _Moved.apply(x_ND, self.token_R, self.place_NK)

    def sums_of(self, rows_RD: Tensor) -> Tensor:
        """Return the sums (N, D) of the rows of each token's pairs."""
        return _Moved.apply(rows_RD, self.place_NK, self.token_R)


class _Moved(torch.autograd.Function):
    """Rows moved to other places; the gradient moves back. Both add in a fixed order."""

    @staticmethod
    def forward(ctx: Saved, rows: Tensor, places: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _take(rows, places)

    @staticmethod
    def backward(ctx: Saved, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _take(grad_outputs[0], *ctx.saved_tensors), None, None


def _take(rows: Tensor, places: Tensor) -> Tensor:
    """Return the rows at `places` (R,), or the sum of rows for each line of `places` (N, K)."""
    # A sum reads and adds in one pass, in float32 for lower precisions.
    return rows[places] if places.ndim == 1 else F.embedding_bag(places, rows, mode="sum")


def send_pairs(
    exchange: Exchange,
    n_experts: int,
    x_ND: Tensor,
    weights_NK: Tensor,
    chosen_NK: Tensor,
    *,
    compute: Callable[..., Tensor],
) -> Tensor:
    """Return the sum (N, D) of the results of each token's experts, some of other ranks; `compute`
    as in `Exchange`."""
    pairs = Pairs.of(weights_NK, chosen_NK)
    ends_E = pairs.ends_E(n_experts)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    return pairs.sums_of(exchange(pairs.rows_of(x_ND), pairs.weight_R, counts_E, compute))


class RoutedExperts(StackedExperts):
    """Gated networks `w2(activation(gate x, up x))` with stacked weights: `w13` (E, 2, H, dim), the
    gate and up of each expert, and `w2` (E, dim, H). If they have biases: `bias13` (E, 2, H),
    `bias2` (E, dim). Plain networks have no gate: (E, 1, H, dim). `top_k`: of a token."""

    matrices = ("w13", "w2")
    hidden_dims = {"w13": 2, "w2": 2, "bias13": 2}
    activation: Callable[..., Tensor] = staticmethod(swiglu)
    """Of gate and up, each (R, H); without a gate, of up alone."""
    n_inputs = 2
    """2 with a gate, 1 without."""
    has_bias = False

    def __init__(
        self,
        *,
        n_experts: int,
        top_k: int,
        dim: int,
        hidden_dim: int,
        init_std: float,
        out_init_std: float,
    ):
        super().__init__()
        self.n_experts = n_experts
        self.active_fraction = top_k / n_experts
        """Part of the weights that multiplies a token, for the count of operations
        (`count_elements`)."""
        self.w13 = nn.Parameter(torch.empty(n_experts, self.n_inputs, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        shape13 = (n_experts, self.n_inputs, hidden_dim)
        self.bias13 = nn.Parameter(torch.empty(shape13)) if self.has_bias else None
        self.bias2 = nn.Parameter(torch.empty(n_experts, dim)) if self.has_bias else None
        weights = {"w13": TruncatedNormal(init_std), "w2": TruncatedNormal(out_init_std)}
        with_initializers(self, **weights, bias13=Constant(0.0), bias2=Constant(0.0))

    def forward(self, x_ND: Tensor, weights_NK: Tensor, chosen_NK: Tensor) -> Tensor:
        if self.exchange is None:
            return self._compute(x_ND, weights_NK, chosen_NK)
        return send_pairs(
            self.exchange, self.n_experts, x_ND, weights_NK, chosen_NK, compute=self._compute
        )

    def _compute(self, x_ND: Tensor, weights_NK: Tensor, chosen_NK: Tensor) -> Tensor:
        """Compute with the experts of this rank, which `chosen_NK` numbers from 0."""
        pairs = Pairs.of(weights_NK, chosen_NK)
        on_cpu = (self.device_type or x_ND.device.type) == "cpu"
        is_plain = not self.calls_product and self.activation is swiglu and self.bias2 is None
        if on_cpu and is_plain:
            return _OneByOne.apply(x_ND, self.w13.flatten(1, 2), self.w2, *pairs)
        # All experts in one product each, without reading a size from the device.
        ends_E = pairs.ends_E(self.n_local)
        both_RH = self.product(pairs.rows_of(x_ND), "w13", ends_E)
        if self.bias13 is not None:
            both_RH = both_RH + self.bias13.flatten(1)[pairs.expert_R]
        hidden_RH = self.activation(*both_RH.chunk(self.n_inputs, dim=1))
        # The weight multiplies the narrower side of w2.
        out_RD = self.product((hidden_RH * pairs.weight_R[:, None]).to(x_ND.dtype), "w2", ends_E)
        if self.bias2 is not None:
            out_RD = out_RD + (self.bias2[pairs.expert_R] * pairs.weight_R[:, None]).to(x_ND.dtype)
        return pairs.sums_of(out_RD)


class ClampedExperts(RoutedExperts):
    """Experts with biases; the inputs of their activation are limited to 7, the gate only from
    above (gpt-oss)."""

    has_bias = True

    @staticmethod
    def activation(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class GeGLUExperts(RoutedExperts):
    """Experts with GeGLU (Gemma 4)."""

    activation = staticmethod(lambda gate, up: gelu_tanh(gate) * up)


class SquaredReLUExperts(RoutedExperts):
    """Plain experts `w2(relu(up x) ** 2)` (Nemotron-H)."""

    activation = staticmethod(squared_relu)
    n_inputs = 1


class InputScaledExperts(RoutedExperts):
    """Experts that get the token times its weight, and whose results are added unscaled (Llama
    4)."""

    def forward(self, x_ND: Tensor, weights_NK: Tensor, chosen_NK: Tensor) -> Tensor:
        scaled = (x_ND[:, None] * weights_NK[..., None].to(x_ND.dtype)).flatten(0, 1)
        ones = torch.ones_like(weights_NK).view(-1, 1)
        return (
            super()
            .forward(scaled, ones, chosen_NK.view(-1, 1))
            .unflatten(0, weights_NK.shape)
            .sum(dim=1)
        )


class _OneByOne(torch.autograd.Function):
    """SwiGLU experts one after another, for CPUs: an expert's tokens, weights and results stay in
    the core's cache from the first product to the last."""

    @staticmethod
    def forward(ctx: Saved, x_ND: Tensor, w13: Tensor, w2: Tensor, *parts: Tensor) -> Tensor:
        pairs = Pairs(*parts)
        both_RH, out_RD = (
            x_ND.new_empty(len(pairs.token_R), size) for size in (w13.shape[1], x_ND.shape[1])
        )
        for e, (tokens, weight, both, out) in enumerate(
            pairs.of_experts(len(w13), both_RH, out_RD)
        ):
            _product(x_ND.index_select(0, tokens), w13[e].T, both)
            _product(swiglu(*both.chunk(2, dim=1)) * weight, w2[e].T, out)
        ctx.save_for_backward(x_ND, w13, w2, both_RH, *parts)
        return _take(out_RD, pairs.place_NK)

    @staticmethod
    def backward(ctx: Saved, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, w13, w2, both_RH, *parts = ctx.saved_tensors
        pairs, (grad_ND,) = Pairs(*parts), grad_outputs
        is_trained = zip((w13, w2), ctx.needs_input_grad[1:3], strict=True)
        grad_w13, grad_w2 = (
            torch.empty_like(weight) if trained else None for weight, trained in is_trained
        )
        grad_weight_R, grad_x_RD = (
            torch.empty_like(pairs.weight_R),
            grad_ND.new_empty(len(both_RH), x_ND.shape[1]),
        )
        rows = pairs.of_experts(len(w13), both_RH, grad_weight_R, grad_x_RD)
        for e, (tokens, weight, both, grad_weight, grad_x) in enumerate(rows):
            x, grad = (rows.index_select(0, tokens) for rows in (x_ND, grad_ND))
            gate, up = both.chunk(2, dim=1)
            grad_hidden = grad.new_empty(gate.shape)
            _product(grad, w2[e], grad_hidden)
            gated = F.silu(gate)
            hidden = gated * up
            torch.sum(grad_hidden * hidden, dim=1, dtype=grad_weight.dtype, out=grad_weight)
            grad_hidden *= weight
            # Not by autograd, which would add its overhead for each expert.
            grad_gate = torch.ops.aten.silu_backward(grad_hidden * up, gate)
            grad_both = torch.cat((grad_gate, grad_hidden * gated), dim=1)
            _product(grad_both, w13[e], grad_x)
            if grad_w13 is not None:
                _product(grad_both.T, x, grad_w13[e])
            if grad_w2 is not None:
                _product(grad.T, hidden * weight, grad_w2[e])
        return _take(grad_x_RD, pairs.place_NK), grad_w13, grad_w2, None, None, grad_weight_R, None


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write `a @ b` into `out`, computed in float32 if the CPU has no products of their type."""
    if multiplies(a.dtype):
        torch.mm(a, b, out=out)
    else:
        out.copy_(a.float() @ b.float())

"""Expert parallelism and few bits for classes of transformers with fused experts, whose parameters
have the experts as dimension 0: those that transformers lets compute with other kernels, and others
that compute the same."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchtitan.models.common.moe.experts import Pairs, send_pairs
from torchtitan.models.transformers.description import build_class, transformers_config
from torchtitan.models.transformers.tiny import (
    TEXT_IDS,
    changed_result,
    gradients_of,
    random_clone,
    text_inputs,
    tiny_config,
    trial,
)
from torchtitan.protocols.experts import StackedExperts
from torchtitan.tools.errors import in_words
from torchtitan.tools.torch_private import parameter_entries

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_NO_WIDTH = "a class of transformers splits no expert; set 1"


class ClassExperts(StackedExperts):
    """Mixin before a class's experts, so that ranks may have a part of them, or keep them in few
    bits. The class computes rows with one expert each; experts in few bits are computed here, as
    transformers' interface of experts does (`transformers.integrations.moe`)."""

    n_experts: int
    """All experts of the layer; the class's `num_experts` counts this rank's."""

    own_forward: Callable[..., Tensor]

    has_gate: bool = True
    has_bias: bool = False
    has_post_expert_norm: bool = False
    act_fn: Callable[..., Tensor]
    post_expert_norm: Callable[..., Tensor]
    _apply_gate: Callable[..., Tensor]

    def forward(self, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:  # type: ignore[override]
        """Return the sum of the chosen experts' results, with the arguments of the class."""
        if self.exchange is None:
            return self._compute(x_ND, weights_NK, chosen_NK)
        return send_pairs(
            self.exchange, self.n_experts, x_ND, weights_NK, chosen_NK, compute=self._compute
        )

    def _compute(self, x_ND: Tensor, weights_NK: Tensor, chosen_NK: Tensor) -> Tensor:
        self.num_experts = self.n_local
        if self.calls_product:
            return self._by_products(x_ND, weights_NK, chosen_NK)
        if len(x_ND):
            return type(self).own_forward(self, x_ND, chosen_NK, weights_NK)
        # FSDP needs gradients on all ranks, so a rank without tokens computes a row of zeros.
        row = (tensor.new_zeros(1, tensor.shape[1]) for tensor in (x_ND, chosen_NK, weights_NK))
        return type(self).own_forward(self, *row)[:0] + x_ND

    def _by_products(self, x_ND: Tensor, weights_NK: Tensor, chosen_NK: Tensor) -> Tensor:
        pairs = Pairs.of(weights_NK, chosen_NK)
        first, last = matrices_of(self)
        hidden_RH = self._linear(pairs.rows_of(x_ND), first, pairs)
        hidden_RH = self._apply_gate(hidden_RH) if self.has_gate else self.act_fn(hidden_RH)
        out_RD = self._linear(hidden_RH, last, pairs)
        if self.has_post_expert_norm:
            out_RD = self.post_expert_norm(out_RD)
        return pairs.sums_of(out_RD * pairs.weight_R[:, None]).to(x_ND.dtype)

    def _linear(self, rows_RI: Tensor, name: str, pairs: Pairs) -> Tensor:
        out = self.product(rows_RI, name, pairs.ends_E(self.n_local))
        return out + getattr(self, f"{name}_bias")[pairs.expert_R] if self.has_bias else out


class EvenExperts(StackedExperts):
    """Mixin before Llama 4's experts, each of which gets the rows of all tokens, so that they may
    be kept in few bits."""

    own_forward: Callable[..., Tensor]
    act_fn: Callable[..., Tensor]

    def forward(self, rows_RD: Tensor) -> Tensor:  # type: ignore[override]
        """Return the results of rows, in the order of experts."""
        if not self.calls_product:
            return type(self).own_forward(self, rows_RD)
        n_rows = len(rows_RD) // self.n_local
        ends_E = n_rows * torch.arange(1, self.n_local + 1, device=rows_RD.device)
        first, last = self.matrices
        gate_RH, up_RH = self.product(rows_RD, first, ends_E.int()).chunk(2, dim=-1)
        return self.product(up_RH * self.act_fn(gate_RH), last, ends_E.int())


def matrices_of(experts: nn.Module) -> tuple[str, str]:
    """Return the parameters before and after the activation."""
    return ("gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj", "down_proj")


@functools.cache
def _with_class(mixin: type[StackedExperts], kind: type[nn.Module]) -> type[StackedExperts]:
    return type(kind.__name__, (mixin, kind), {"own_forward": kind.forward})


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the fused experts of a class by name; each is a layer's."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_apply_gate") and hasattr(module, "num_experts")
    }


def even_experts(model: nn.Module) -> list[nn.Module]:
    """Return Llama 4's experts, each layer's, which the interface of experts does not compute."""
    return [
        module
        for module in model.modules()
        if isinstance(module, EvenExperts) or type(module).__name__ == "Llama4TextExperts"
    ]


def stack_experts(model: nn.Module) -> list[StackedExperts]:
    """Make a class's experts `StackedExperts`, in place, and return those that ranks may divide."""
    for name, module in fused_experts(model).items():
        if not isinstance(module, ClassExperts):
            _stack(module, ClassExperts)
            module.n_experts = module.num_experts
            # Compiled blocks run the module around them uncompiled, since its sizes change.
            model.get_submodule(name.rpartition(".")[0]).is_compiled = False  # type: ignore[assignment]
    for module in even_experts(model):
        if not isinstance(module, EvenExperts):
            _stack(module, EvenExperts)
            module.is_transposed = True  # type: ignore[assignment]
    return [module for module in model.modules() if isinstance(module, ClassExperts)]


def _stack(module: nn.Module, mixin: type[StackedExperts]) -> None:
    module.__class__ = _with_class(mixin, type(module))  # type: ignore[arg-type]
    assert isinstance(module, StackedExperts)
    module.matrices = matrices_of(module)
    module.hidden_dims = dict.fromkeys(module.matrices)


@trial
def class_experts(document: Mapping[str, object]) -> tuple[int, str]:
    """Return the number that expert parallelism divides, of experts in each layer, and why it is
    not supported ("": it is)."""
    config = transformers_config(document)
    try:
        reason = _try(config)
    except Exception as error:  # any class, called in a way that it was not written for
        reason = f"a trial with divided experts failed: {in_words(error)}"
    if reason:
        return 0, reason
    with torch.device("meta"):
        layers = fused_experts(build_class(config)).values()
    return math.gcd(*(int(layer.num_experts) for layer in layers)), ""  # type: ignore[arg-type]


def unsupported_experts(document: Mapping[str, object]) -> dict[str, str]:
    """Return the options of expert parallelism that must be 1, with the reasons."""
    reasons = {
        "expert_parallel_degree": class_experts(document)[1],
        "expert_tensor_parallel_degree": _NO_WIDTH,
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _try(config: "PretrainedConfig") -> str:
    """Divide the experts of a tiny clone in two, and return what changes."""
    with torch.device("meta"):
        layers = fused_experts(build_class(tiny_config(config)))
    if not layers:
        return "its class has no fused experts"
    for layer in layers.values():
        n_experts = layer.num_experts
        if any(len(parameter) != n_experts for parameter in layer.parameters()):
            return f"{type(layer).__name__} has weights for all experts"
    tokens_BL = torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (2, 24))
    whole, divided = random_clone(config), random_clone(config)
    for experts in stack_experts(divided):
        experts.exchange = _InTwo(experts)
    results = []
    for model in (whole, divided):
        with torch.enable_grad():
            logits = model(**text_inputs(model, tokens_BL)).logits
            (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        results.append((logits.detach(), gradients_of(model)))
    (expected, gradients), (logits, found) = results
    changed = changed_result(logits, expected, found, gradients)
    return changed and f"in a trial, dividing its experts changed {changed}"


class _InTwo:
    """An `Exchange` within one process: each half of the experts computes its rows alone."""

    def __init__(self, experts: StackedExperts):
        self.experts = experts

    def __call__(
        self, rows_RD: Tensor, weight_R: Tensor, counts_E: Tensor, compute: Callable[..., Tensor]
    ) -> Tensor:
        whole = dict(parameter_entries(self.experts))
        expert_R = torch.arange(len(counts_E)).repeat_interleave(counts_E)
        start, results = 0, []
        for size in (len(counts_E) // 2, len(counts_E) - len(counts_E) // 2):
            here = (expert_R >= start) & (expert_R < start + size)
            parts = {
                name: None if weight is None else weight[start : start + size]
                for name, weight in whole.items()
            }
            parameter_entries(self.experts).update(parts)
            chosen_M = expert_R[here] - start
            results.append(compute(rows_RD[here], weight_R[here][:, None], chosen_M[:, None]))
            start += size
        parameter_entries(self.experts).update(whole)
        return torch.cat(results)

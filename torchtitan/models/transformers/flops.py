"""Operations of a class of transformers, counted in a forward pass without memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.protocols.model import count_elements


def _grouped_product(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Return the operations of a product of groups of rows (N, K) with one matrix (E, K, M) for each group."""
    return 2 * a.numel() * b[-1]


_GROUPED = {torch.ops.aten._grouped_mm: _grouped_product}

_SHORT = 64
"""Tokens of the shorter of two passes whose operations are extrapolated."""


def forward_flops(run: Callable[[Tensor], Any], seq_len: int, *, is_recurrent: bool) -> float:
    """Return the operations per token of `run`, a model's forward pass on fake tensors, for windows of `seq_len`.

    Matrix products are counted, those of attention over the whole square. A recurrent class may loop over the tokens,
    so that its longer windows are extrapolated as a sum of parts that grow with the length and its square.
    """

    def count(length: int) -> float:
        with FlopCounterMode(display=False, custom_mapping=_GROUPED) as counter, torch.no_grad():
            run(torch.zeros(1, length, dtype=torch.long))
        return counter.get_total_flops() / length

    if not is_recurrent or seq_len <= 2 * _SHORT:
        return count(seq_len)
    short, long = count(_SHORT), count(2 * _SHORT)
    return short + (long - short) / _SHORT * (seq_len - _SHORT)


def with_backward(forward: float, model: nn.Module, used: nn.Module) -> float:
    """Return the operations per token of a forward and a backward pass, given those of the forward pass.

    A backward pass takes as many for the gradients of inputs, and as many again for those of weights, except frozen
    ones (of linear layers in `used`). No pass is needed without trained parameters.
    """
    trained = sum(size for size, is_trained in count_elements(model) if is_trained)
    if not trained:
        return forward
    frozen = sum(
        parameter.numel()
        for layer in used.modules()
        if isinstance(layer, nn.Linear)
        for name, parameter in layer.named_parameters(recurse=False)
        if name == "weight" and not parameter.requires_grad
    )
    return 3 * forward - 2 * frozen

"""Counts the operations of a transformers class in its forward pass on tensors without memory."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.protocols.model import BaseModel, converted_modules
from torchtitan.tools.logging import logger
from torchtitan.tools.torch_private import (
    OpOverload,
    TorchDispatchMode,
    flop_formulas,
    reading_operation,
)

_STEP = 64
"""Length of the shortest of three passes whose operations are extrapolated; chunks of recurrent
layers divide it."""


class _WithoutValues(TorchDispatchMode):
    """Answers checks of values, such as whether a mask hides anything, with no."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return False if func is reading_operation() else func(*args, **(kwargs or {}))


def forward_flops(plain: nn.Module, seq_len: int, *, is_recurrent: bool) -> float:
    """Return the operations per token of a forward pass over windows of `seq_len` tokens: matrix
    products and convolutions, in attention over the whole square. A recurrent class may loop over
    tokens, so that longer passes are extrapolated: operations are a polynomial of the length, of
    degree 2. A class that reads values, as to group tokens by expert, is taken to use every matrix
    once, with a warning. `plain` is the class on the meta device with attention "eager"; its type
    changes."""
    plain.bfloat16()  # grouped products know no other type
    flop_formulas()

    def count(length: int) -> int:
        with _WithoutValues(), FlopCounterMode(display=False) as counter:
            plain(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
        return counter.get_total_flops()

    try:
        with torch.device("meta"), torch.no_grad():
            if not is_recurrent or seq_len <= 3 * _STEP:
                return count(seq_len) / seq_len
            first, second, third = (count(n * _STEP) for n in (1, 2, 3))
            n = seq_len / _STEP - 1
            return (
                first + n * (second - first) + n * (n - 1) / 2 * (third - 2 * second + first)
            ) / seq_len
    except RuntimeError as error:
        logger.warning(
            "operations are estimated as 6 per parameter, used or not: %s",
            str(error).split("\n")[0],
        )
        return 2.0 * sum(
            parameter.numel() for parameter in plain.parameters() if parameter.ndim > 1
        )


def with_backward(forward: float, model: BaseModel, used: Iterable[nn.Module]) -> float:
    """Return the operations per token of a forward and a backward pass of `model`. The backward
    pass takes `forward` operations for the gradients of inputs and the same number for the
    gradients of weights, less 2 per frozen weight of the linear layers among the modules `used`;
    adapters add 6 per element. A model without trained parameters has no backward pass."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not trained:
        return forward
    linear = [layer for layer in used if isinstance(layer, nn.Linear)]
    frozen = sum(
        x.in_features * x.out_features
        for x in linear
        if id(getattr(x, "weight", None)) not in trained
    )
    adapters = sum(
        part.get_parameter(name).numel()
        for _, part in converted_modules(model)
        for name in part.added
    )
    return 3 * forward - 2 * frozen + 6 * adapters

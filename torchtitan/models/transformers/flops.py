"""Counts the operations of a transformers class in its forward pass on tensors without memory."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.models.transformers.balance import returns_router_loss
from torchtitan.models.transformers.tiny import text_inputs
from torchtitan.protocols.model import BaseModel, converted_modules
from torchtitan.tools.equal_layers import facts_of, facts_of_layer
from torchtitan.tools.logging import logger
from torchtitan.tools.torch_private import (
    OpOverload,
    TorchDispatchMode,
    flop_formulas,
    reading_operation,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STEP = 64
"""Length of the shortest of three passes whose operations are extrapolated; chunks of recurrent
layers divide it."""


class _WithoutValues(TorchDispatchMode):
    """Answers checks of values, such as whether a mask hides anything, with no."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return False if func is reading_operation() else func(*args, **(kwargs or {}))


class _EqualLayers:
    """Counts the operations of equal layers of a model on the meta device once. A later layer
    returns the result of an equal one: they would differ in values, and there are none.

    Layers are items of a list of modules. They are equal if their modules have the same types,
    fields and shapes of parameters, and their arguments have the same shapes. A layer always runs
    if an argument is neither tensor, number nor text, nor a collection of them, and if it changes
    its fields or arguments. `model` stays changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._repeated = 0
        self._known: dict[object, tuple[int, object]] = {}  # operations and result
        for owner in model.modules():
            if isinstance(owner, nn.ModuleList):
                for index, layer in enumerate(owner):
                    run = functools.partial(self._run, index, layer, layer.forward)
                    vars(layer)["forward"] = run

    def count(self, run: Callable[[], object]) -> int:
        """Return the operations of `run`, which calls the model."""
        self._repeated = 0
        with _WithoutValues(), FlopCounterMode(display=False) as self._counter:
            run()
        return self._so_far()

    def _so_far(self) -> int:
        return self._counter.get_total_flops() + self._repeated

    def _run(
        self,
        index: int,
        layer: nn.Module,
        compute: Callable[..., object],
        *args: object,
        **kwargs: object,
    ) -> object:
        def facts() -> object:
            return facts_of_layer(layer, index), facts_of((args, kwargs))

        try:
            key = facts()
        except TypeError:  # of an argument
            return compute(*args, **kwargs)
        if key in self._known:
            flops, result = self._known[key]
            self._repeated += flops
            return result
        before = self._so_far()
        result = compute(*args, **kwargs)
        if facts() == key:
            self._known[key] = self._so_far() - before, result
        return result


def forward_flops(plain: "PreTrainedModel", seq_len: int, *, is_recurrent: bool) -> float:
    """Return the operations per token of a forward pass over windows of `seq_len` tokens: matrix
    products and convolutions, in attention over the whole square. A recurrent class may loop over
    tokens, so that longer passes are extrapolated: operations are a polynomial of the length, of
    degree 2. A class that reads values, as to group tokens by expert, is taken to use every matrix
    once, and of stacked experts as many as a token chooses, with a warning. `plain` is the class on
    the meta device with attention "eager"; it stays changed."""
    plain.bfloat16()  # grouped products know no other type
    flop_formulas()

    # The loss of routers reads what each layer records, also of equal ones.
    repeated: nn.Module = nn.Module() if returns_router_loss(plain.config) else plain
    layers = _EqualLayers(repeated)

    def count(length: int) -> int:
        tokens = torch.zeros(1, length, dtype=torch.long)
        inputs = text_inputs(plain, tokens)
        return layers.count(lambda: plain(**inputs))

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
            "operations are estimated as 6 per parameter that a token uses: %s",
            str(error).split("\n")[0],
        )
        return 2.0 * _n_used(plain)


def _n_used(plain: "PreTrainedModel") -> float:
    """Return the values of matrices that multiply a token, on average; of all experts if the
    configuration does not say how many a token chooses."""
    text = plain.config.get_text_config(decoder=True)
    n_read, n_other, n_chosen = (
        getattr(text, name, None)
        for name in ("num_local_experts", "zero_expert_num", "num_experts_per_tok")
    )
    part = n_chosen / (n_read + (n_other or 0)) if n_read and n_chosen else 1.0
    matrices = {name: value for name, value in plain.named_parameters() if value.ndim > 1}
    return sum(
        value.numel() * (part if value.ndim == 3 and ".experts." in name else 1.0)
        for name, value in matrices.items()
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

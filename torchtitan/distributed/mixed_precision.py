"""Mixed precision in a single process. With several processes, FSDP and DDP cast the weights of
their units."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torchtitan.tools.torch_private import parameter_entries


class MixedPrecision:
    """Copies of the weights in `dtype` for computing, as under FSDP: the residual stream has this
    type, and gradients accumulate in the type of the weights. The copies keep their memory from
    step to step."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self._copies: dict[Tensor, Tensor] = {}
        self._reused: set[Tensor] | None = None  # weights copied in a context of `fixed_weights`

    @contextlib.contextmanager
    def fixed_weights(self) -> Iterator[None]:
        """Copy each weight only once until the context ends, as the weights do not change in it."""
        self._reused = set()
        try:
            yield
        finally:
            self._reused = None

    @contextlib.contextmanager
    def of(self, *models: nn.Module) -> Iterator[None]:
        """Copy the weights, and compute with the copies until the context ends. It spans a forward
        pass and its backward pass, so that activation checkpointing recomputes with the same
        copies. In the context, a model's parameters are the copies, and a nested context changes
        nothing."""
        weights = []
        for module in (module for model in models for module in model.modules()):
            parameters = parameter_entries(module)
            weights += [
                (parameters, name, weight)
                for name, weight in parameters.items()
                if self._is_copied(weight)
            ]
        if not weights:
            yield
            return
        unique = {weight for _, _, weight in weights}
        self._copies = {weight: self._copy(weight) for weight in unique}
        try:
            for parameters, name, weight in weights:
                # Not attributes: a module accepts only a leaf, and gradients must reach the weight.
                parameters[name] = self._copies[weight]
            yield
        finally:
            for parameters, name, weight in weights:
                parameters[name] = weight

    def _is_copied(self, weight: Tensor | None) -> bool:
        return weight is not None and weight.is_floating_point() and weight.dtype != self.dtype

    def _copy(self, weight: Tensor) -> Tensor:
        known = self._copies.get(weight)
        if self._reused is not None:
            if known is not None and weight in self._reused:
                return known
            self._reused.add(weight)
        # Memory that was allocated in inference mode could not be used in training.
        with torch.inference_mode(False), torch.enable_grad():
            memory = torch.empty_like(weight, dtype=self.dtype) if known is None else known
            return memory.detach().copy_(weight)

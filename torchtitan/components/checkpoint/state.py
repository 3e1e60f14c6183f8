"""States of wrapped models and random number generators, which have no suitable `state_dict` in
PyTorch."""

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from torchtitan.distributed.initialize import canonical_name
from torchtitan.protocols.model import ConvertedModule, converted_modules
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful  # takes a second to import


Entries = dict[str, torch.Tensor | str]
"""Saved form of a state: its tensors by name, and everything else in one string."""


class ModelState:
    """Weights of a model, or of this process's pipeline stages, under their canonical names. Names
    omit the prefixes of DDP, `torch.compile` and activation checkpointing, and sharded parameters
    are DTensors, so a checkpoint is independent of wrappers and layout."""

    def __init__(self, model_parts: Sequence[nn.Module]):
        self.model_parts = model_parts

    def state_dict(self) -> dict[str, Tensor]:
        """Return canonical name → parameter or persistent buffer, without copying."""
        return {name: value for part in self._part_state_dicts() for name, value in part.items()}

    def copies(self) -> dict[str, list[Tensor]]:
        """Return canonical name → all tensors with this name: two if this process has the first and
        the last pipeline stage, and they share a module."""
        copies: dict[str, list[Tensor]] = defaultdict(list)
        for part in self._part_state_dicts():
            for name, value in part.items():
                copies[name].append(value)
        return copies

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy `state_dict` into the model. Raise `UserError` if names are missing or unknown."""
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        part_names = [part.keys() for part in self._part_state_dicts()]
        differing = set(state_dict) ^ set().union(*part_names)
        if differing:
            raise UserError(
                "the weights to load and the model have different names: "
                f"{', '.join(sorted(differing))}"
            )
        for part, names in zip(self.model_parts, part_names, strict=True):
            set_model_state_dict(part, {name: state_dict[name] for name in names})

    @property
    def added(self) -> set[str]:
        """Names of the tensors absent from the plain model (`ConvertedModule.added`)."""
        return self._collect_names(lambda module: module.added)

    @property
    def buffers(self) -> set[str]:
        """Names of the buffers, which keep their types."""
        return {
            canonical_name(name) for part in self.model_parts for name, _ in part.named_buffers()
        }

    @property
    def derived(self) -> set[str]:
        """Names of the tensors that differ in form from the plain model's
        (`ConvertedModule.derived`)."""
        return self._collect_names(lambda module: module.derived)

    @property
    def converted(self) -> set[str]:
        """Names of all tensors of a `ConvertedModule`."""
        return self._collect_names(lambda module: module.state_dict())

    @property
    def frozen(self) -> set[str]:
        """Names of the frozen parameters that follow from the plain model's weights."""
        named = [pair for part in self.model_parts for pair in part.named_parameters()]
        return {
            canonical_name(name) for name, parameter in named if not parameter.requires_grad
        } - self.added

    def _collect_names(self, get_names: Callable[[ConvertedModule], Collection[str]]) -> set[str]:
        modules = [pair for part in self.model_parts for pair in converted_modules(part)]
        names = [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in modules
            for name in get_names(module)
        ]
        return {canonical_name(name) for name in names}

    def _part_state_dicts(self) -> list[dict[str, Tensor]]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return [cast(dict[str, Tensor], get_model_state_dict(part)) for part in self.model_parts]


class TrainedState:
    """Weights of a model except the `frozen` weights, for checkpoints that omit them."""

    def __init__(self, state: ModelState):
        self._state = state

    def state_dict(self) -> dict[str, Tensor]:
        frozen = self._state.frozen
        return {
            name: value for name, value in self._state.state_dict().items() if name not in frozen
        }

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        self._state.load_state_dict({**self._state.state_dict(), **state_dict})


class RandomState:
    """Random number generators of this process (PyTorch, NumPy and Python), as one of the
    `rank_states`."""

    def state_dict(self) -> dict[str, object]:
        """Return generator → state: byte tensors for PyTorch ("cpu", "cuda", …), lists for NumPy
        and Python."""
        import numpy

        state: dict[str, object] = {"cpu": torch.get_rng_state()}
        if accelerator := torch.accelerator.current_accelerator(check_available=True):
            state[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
        numpy_state: Any = numpy.random.get_state()
        algorithm, keys, *position = numpy_state
        state["numpy"] = [algorithm, keys.tolist(), *position]
        version, internal, gauss_next = random.getstate()
        state["python"] = [version, list(internal), gauss_next]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore `state_dict`, except the generator of an accelerator whose type differs from the
        saved one."""
        import numpy

        torch.set_rng_state(state_dict["cpu"])
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator and accelerator.type in state_dict:
            torch.get_device_module(accelerator).set_rng_state(state_dict[accelerator.type])
        algorithm, keys, *position = state_dict["numpy"]
        numpy.random.set_state((algorithm, numpy.array(keys, dtype=numpy.uint32), *position))
        version, internal, gauss_next = state_dict["python"]
        random.setstate((version, tuple(internal), gauss_next))


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore this process's random number generators after the block."""
    random_state = RandomState()
    before = random_state.state_dict()
    try:
        yield
    finally:
        random_state.load_state_dict(before)


def without_frozen(states: "Mapping[str, Stateful]") -> "dict[str, Stateful]":
    """Return `states` with each `ModelState` as a `TrainedState`."""
    return {
        name: TrainedState(state) if isinstance(state, ModelState) else state
        for name, state in states.items()
    }


def with_parameter_names(
    name: str, state: "Stateful", states: "Mapping[str, Stateful]"
) -> "Stateful":
    """Wrap a torch optimizer, whose state numbers the parameters, in an `OptimizerState` of its
    model; return other states as is. Raise `UserError` if no model has the optimizer's
    parameters."""
    if not isinstance(state, torch.optim.Optimizer):
        return state
    from torchtitan.components.optim.optimizer_state import OptimizerState

    updated = {parameter for group in state.param_groups for parameter in group["params"]}
    models = [model for model in states.values() if isinstance(model, ModelState)]
    for part in (part for model in models for part in model.model_parts):
        if updated <= set(part.parameters()):
            return OptimizerState(part, state)
    raise UserError(
        f"state {name!r} is a torch.optim.{type(state).__name__}, but no ModelState among the "
        "states has its parameters; add the model's, or use "
        "torchtitan.components.optim.optimizer_state.OptimizerState(model, optimizer)"
    )

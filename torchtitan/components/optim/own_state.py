"""Bases of the optimizers whose state is this package's own."""

from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from torchtitan.distributed.initialize import local_part

Groups = list[dict[str, object]]
"""Parameter groups, with settings of their own."""


class AdamSettings(TypedDict):
    """Settings of Adam and its relatives."""

    lr: float
    betas: tuple[float, float]
    eps: float


class Group(AdamSettings):
    """Settings of a group, as an update reads them: those that its optimizer has."""

    weight_decay: float
    momentum: float
    basis_interval: int
    rank_fraction: float
    ns_coefficients: tuple[float, float, float]
    ns_steps: int
    adjust_lr_fn: str


class KeptTypes(torch.optim.Optimizer):
    """A mixin before an optimizer class, whose state keeps its types when it is loaded. PyTorch
    would cast it to the type of the parameters."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of parameters that have one."""
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        states = {parameter: dict(self.state[parameter]) for parameter in own}
        super().load_state_dict({**state_dict, "state": {}})
        for key, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                local_part(states[parameter][name]).copy_(local_part(value))
        self.state.update(states)


class Allocated(torch.optim.Optimizer):
    """A mixin before an optimizer class, whose state exists before its first update."""

    def allocate(self) -> None:
        """Allocate the state of all parameters that have none."""
        raise NotImplementedError


class OwnState(KeptTypes, Allocated):
    """An optimizer that updates one parameter after another, in `update`. The numbers in its state
    are known to the host without waiting for a device.

    Args:
        groups: parameter groups.
        settings: hyperparameters of groups that do not have their own.
    """

    number_names: tuple[str, ...] = ("step",)
    """Entries of a parameter's state that are numbers, 0 before its first update: scalars in CPU
    memory, float64."""

    def __init__(self, groups: Groups, **settings: object):
        super().__init__(groups, settings)
        self._numbers: dict[Tensor, dict[str, float]] = {}

    def new_state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        """Return the tensors of a parameter's state before its first update."""
        raise NotImplementedError

    def update(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        """Update this rank's part of a parameter, and its state. `gradient` is like the
        parameter."""
        raise NotImplementedError

    def allocate(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self.state:
                    continue
                zeros = {name: torch.zeros((), dtype=torch.float64) for name in self.number_names}
                self.state[parameter] = {**self.new_state(parameter, cast(Group, group)), **zeros}
                self._numbers[parameter] = dict.fromkeys(self.number_names, 0.0)

    def number(self, parameter: Tensor, name: str) -> float:
        """Return a number of a parameter's state."""
        return self._numbers[parameter][name]

    def set_number(self, parameter: Tensor, name: str, value: float) -> None:
        """Change a number of a parameter's state."""
        self._numbers[parameter][name] = value
        self.state[parameter][name].fill_(value)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.allocate()
        for group in self.param_groups:
            settings = cast(Group, group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.set_number(parameter, "step", self.number(parameter, "step") + 1)
                    self.update(parameter, parameter.grad, settings)

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load the state of parameters that have one."""
        super().load_state_dict(state_dict)
        for parameter, numbers in self._numbers.items():
            numbers.update({name: float(self.state[parameter][name]) for name in numbers})

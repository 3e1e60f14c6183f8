"""`OptimizerState`: the state of torch optimizers, for checkpoints."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchtitan.components.optim.own_state import Allocated
from torchtitan.components.optim.schedule_free import ScheduleFreeAdamW
from torchtitan.distributed.initialize import canonical_name


class OptimizerState:
    """State of all torch optimizers of a model, wrapped and sharded for training, by canonical
    parameter name. For `CheckpointManager`'s `states`."""

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer):
        self.model = model
        self.optimizers = optimizers

    def state_dict(self) -> dict[str, Any]:
        """Return `state.<parameter>.<moment>` and `param_groups.<parameter>.<hyperparameter>` by
        parameter name."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
        )

        for optimizer in self.optimizers:
            allocate_moments(optimizer)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state = get_optimizer_state_dict(self.model, self.optimizers, options=options)
        # Copies outside of `evaluating`: a checkpoint is read in place, and weights have their own
        # entries.
        training = {
            key: optimizer.training_weights.get(parameter, parameter).detach().clone()
            for key, parameter, optimizer in self._with_training_weights()
        }
        return state | training

    def _with_training_weights(self) -> Iterator[tuple[str, nn.Parameter, ScheduleFreeAdamW]]:
        """Yield the keys of trained weights that differ from the model's weights in a checkpoint,
        the parameters, and their optimizers."""
        names = {
            parameter: canonical_name(name) for name, parameter in self.model.named_parameters()
        }
        for optimizer in self.optimizers:
            if isinstance(optimizer, ScheduleFreeAdamW):
                for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                    yield f"state.{names[parameter]}.training_weight", parameter, optimizer

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the entries of `state_dict` that belong to these optimizers; other entries stay
        unchanged."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_optimizer_state_dict,
        )

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(
            self.model, self.optimizers, {**self.state_dict(), **state_dict}, options=options
        )
        with torch.no_grad():
            for key, parameter, _ in self._with_training_weights():
                if key in state_dict:
                    parameter.copy_(state_dict[key])


def allocate_moments(optimizer: torch.optim.Optimizer) -> None:
    """Allocate zero moments for parameters without moments, so that checkpoints always contain the
    same tensors. PyTorch's own initialization in `state_dict` counts as a step, and yields nonzero
    moments if weight decay is part of the gradient."""
    if isinstance(optimizer, Allocated):
        optimizer.allocate()
        return
    groups = optimizer.param_groups
    missing = [
        [p for p in group["params"] if p.requires_grad and p not in optimizer.state]
        for group in groups
    ]
    gradients = {parameter: parameter.grad for parameters in missing for parameter in parameters}
    if not gradients:
        return
    for parameter in gradients:
        parameter.grad = torch.zeros_like(parameter)
    settings = {"lr": 0.0, "weight_decay": 0.0}
    # One by one: DTensor's rules for a list of tensors take time that grows with its square.
    optimizer.param_groups = [
        {**group, **settings, "params": [parameter]}
        for group, parameters in zip(groups, missing, strict=True)
        for parameter in parameters
    ]
    optimizer.step()
    optimizer.param_groups = groups
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
        if "step" in optimizer.state[parameter]:
            optimizer.state[parameter]["step"] *= 0

"""Classes of `torch.optim` that do not import PyTorch's compiler."""

import inspect
from typing import TypeVar

import torch

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_OTHER_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def without_compiler(kind: type[OptimizerT]) -> type[OptimizerT]:
    """Return a subclass of a class of `torch.optim` that computes the same, and does not import the
    compiler, which takes a second at the start of a run. PyTorch wraps the methods only to keep the
    compiler out of them, and steps are not compiled here."""
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in _OTHER_METHODS}
    # PyTorch's wrapper of `step` also turns gradients off.
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), {**methods, "step": step})

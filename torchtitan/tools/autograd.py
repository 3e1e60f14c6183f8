"""Types of what a `torch.autograd.Function` keeps for its backward pass."""

from typing import Protocol

from torch import Tensor


class Context(Protocol):
    """The first argument of the methods of a `torch.autograd.Function`. A subclass declares the
    values that a function keeps in it."""

    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class Saved(Context, Protocol):
    """Keeps tensors only."""

    saved_tensors: tuple[Tensor, ...]

"""Initial distributions of parameters, stored in the modules that own them.

Modules may be built on the meta device and sharded before their weights exist. `torchtitan.distributed.initialize` then
fills in the weights, with the same values for any layout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

_ATTRIBUTE = "parameter_initializers"
ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Initializer(Protocol):
    """Fill a tensor in place with values drawn from `generator`."""

    def __call__(self, tensor: Tensor, generator: torch.Generator) -> None: ...


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal with mean 0 and standard deviation `std`, truncated at `bound` standard deviations."""

    std: float
    bound: float = 3.0

    def __call__(self, tensor: Tensor, generator: torch.Generator) -> None:
        limit = self.bound * self.std
        nn.init.trunc_normal_(tensor, mean=0.0, std=self.std, a=-limit, b=limit, generator=generator)


@dataclass(frozen=True)
class Constant:
    """A constant."""

    value: float

    def __call__(self, tensor: Tensor, generator: torch.Generator) -> None:
        nn.init.constant_(tensor, self.value)


@dataclass(frozen=True)
class DerivedRows:
    """Initial values derived from the same rows of another parameter, which may exist only in the plain module: row
    norms, 4-bit rows."""

    plain: str
    """Name of the other parameter in the plain module (`torchtitan.protocols.model.ConvertedModule`)."""

    shape: torch.Size

    initializer: Initializer

    from_rows: Callable[[Tensor], Tensor]
    """Rows of the other parameter, (n, …) in float32 → the same rows of this one."""

    def __call__(self, tensor: Tensor, generator: torch.Generator) -> None:
        rows = torch.empty(tensor.shape[0], *self.shape[1:])
        self.initializer(rows, generator)
        tensor.copy_(self.from_rows(rows))


def with_initializers(module: ModuleT, **initializers: Initializer) -> ModuleT:
    """Attach the initial distribution of each of `module`'s own parameters (`weight=…`), and return `module`."""
    setattr(module, _ATTRIBUTE, initializers)
    return module


def initializers_of(module: nn.Module) -> dict[str, Initializer]:
    """Return the initial distributions attached to `module`, by name."""
    return dict(getattr(module, _ATTRIBUTE, {}))


def initializer_of(module: nn.Module, parameter: str) -> Initializer:
    """Return the initial distribution of `module`'s own parameter. Raise `LookupError` if there is none."""
    initializers = initializers_of(module)
    if parameter not in initializers:
        raise LookupError(
            f"{type(module).__name__} has no initializer for its parameter or buffer '{parameter}'; "
            "attach one with torchtitan.protocols.initializer.with_initializers"
        )
    return initializers[parameter]

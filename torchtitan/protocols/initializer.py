"""Initial distributions of parameters, stored in the modules that own them.

Modules may be built on the meta device and sharded before their weights exist.
`torchtitan.distributed.initialize` then fills in the weights, with the same values for any layout.

A distribution is its quantile function (inverse CDF): it maps uniform random numbers to values, one
by one. The values of the distributions here depend on no version of PyTorch or NumPy and on no
processor, since only operations are used that IEEE 754 rounds correctly (+, -, *, /, square root),
unlike `torch.erfinv` or `torch.log`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchtitan.tools.errors import UserError

_ATTRIBUTE = "parameter_initializers"
Numbers = NDArray[numpy.floating]
"""float32 numbers; NumPy's type hints do not know that a Python number leaves them float32."""
ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Initializer(Protocol):
    """Map uniform random numbers between -1 and 1, rows (n, …), to the initial values of n rows.
    Several threads call this at once."""

    def __call__(self, uniform: Numbers) -> Numbers: ...


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal with mean 0 and standard deviation `std`, truncated at `bound` standard deviations."""

    std: float
    bound: float = 3.0

    def __call__(self, uniform: Numbers) -> Numbers:
        z = normal_quantile(uniform * math.erf(self.bound / math.sqrt(2)))
        z *= self.std
        limit = self.bound * self.std
        return numpy.clip(z, -limit, limit, out=z)


@dataclass(frozen=True)
class Uniform:
    """Uniform between `low` and `high`."""

    low: float
    high: float

    def __call__(self, uniform: Numbers) -> Numbers:
        return uniform * ((self.high - self.low) / 2) + (self.high + self.low) / 2


@dataclass(frozen=True)
class LogUniform:
    """Natural logarithm of uniform numbers between `low` and `high`, which are above 0."""

    low: float
    high: float

    def __call__(self, uniform: Numbers) -> Numbers:
        return _logarithm(Uniform(self.low, self.high)(uniform))


@dataclass(frozen=True)
class Constant:
    """A constant."""

    value: float

    def __call__(self, uniform: Numbers) -> Numbers:
        return numpy.full_like(uniform, self.value)


@dataclass(frozen=True)
class DerivedRows:
    """Initial values derived from the same rows of another parameter, which may exist only in the
    plain module: row norms, 4-bit rows. Both parameters share their uniform numbers."""

    plain: str
    """Name of the other parameter in the plain module
    (`torchtitan.protocols.model.ConvertedModule`)."""

    shape: torch.Size

    initializer: Initializer | None
    """Distribution of the other parameter. None: the model supplies its values
    (`BaseModel.values_of`)."""

    from_rows: Callable[[Tensor], Tensor]
    """Rows of the other parameter, (n, …) in float32, or of its `part` → the same rows of this
    one."""

    part: str = ""
    """Part of the other parameter in few bits (`TensorSource.of_part`) that this one is derived
    from; empty: its values."""

    form: str = ""
    """Entry of `TensorSource.forms` that the other parameter must have for this part."""

    @torch.no_grad()
    def __call__(self, uniform: Numbers) -> Numbers:
        if self.part:
            raise UserError(
                f"the converted model keeps {self.plain} in few bits ({self.form}), which only a "
                "checkpoint has; set --checkpoint.initial_load_path"
            )
        assert self.initializer is not None
        return self.from_rows(torch.from_numpy(self.initializer(uniform))).numpy()


def with_initializers(module: ModuleT, **initializers: Initializer) -> ModuleT:
    """Attach the initial distribution of each of `module`'s own parameters (`weight=…`), and return
    `module`."""
    setattr(module, _ATTRIBUTE, initializers)
    return module


def initializers_of(module: nn.Module) -> dict[str, Initializer]:
    """Return the initial distributions attached to `module`, by name."""
    return dict(getattr(module, _ATTRIBUTE, {}))


def initializer_of(module: nn.Module, parameter: str) -> Initializer:
    """Return the initial distribution of `module`'s own parameter. Raise `LookupError` if it has
    none attached."""
    initializers = initializers_of(module)
    if parameter not in initializers:
        raise LookupError(
            f"{type(module).__name__} has no initializer for its parameter or buffer "
            f"'{parameter}'; attach one with torchtitan.protocols.initializer.with_initializers"
        )
    return initializers[parameter]


# Coefficients of PPND7, from the highest power, for probabilities at most 0.425 from 1/2, and for
# the tails.
_CENTER = (5.9109374720e1, 1.5929113202e2, 5.0434271938e1, 3.3871327179e0)
_CENTER_DIVISOR = (6.7187563600e1, 7.8757757664e1, 1.7895169469e1, 1.0)
_TAIL = (1.7023821103e-1, 1.3067284816e0, 2.7568153900e0, 1.4234372777e0)
_TAIL_DIVISOR = (1.2021132975e-1, 7.3700164250e-1, 1.0)
# log((1 + s) / (1 - s)) = 2 (s + s³ / 3 + …); |s| is at most 0.172 below, so the next term is at
# most 7e-10.
_LOGARITHM = (2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0)


def normal_quantile(uniform: Numbers) -> Numbers:
    """Map uniform numbers, odd multiples of 2⁻²⁴ in (-1, 1) or numbers closer to 0, to the standard
    normal distribution with an error of at most 2e-6: the values z with P(|Z| < z) = uniform.
    Algorithm AS 241, PPND7 (Wichura 1988, Applied Statistics 37:477-484)."""
    half = uniform.ravel() / 2
    r = 0.180625 - half * half
    z = half * _polynomial(r, _CENTER)
    z /= _polynomial(r, _CENTER_DIVISOR)
    (in_tail,) = numpy.nonzero(r < 0)
    tail = half[in_tail]
    r = numpy.sqrt(-_logarithm(0.5 - numpy.abs(tail))) - 1.6
    z[in_tail] = numpy.copysign(_polynomial(r, _TAIL) / _polynomial(r, _TAIL_DIVISOR), tail)
    return z.reshape(uniform.shape)


def _logarithm(x: Numbers) -> Numbers:
    """Return the natural logarithm of positive numbers."""
    fraction, exponent = numpy.frexp(x)
    fraction *= math.sqrt(2)
    s = (fraction - 1) / (fraction + 1)
    return s * _polynomial(s * s, _LOGARITHM) + (exponent.astype(numpy.float32) - 0.5) * math.log(2)


def _polynomial(x: Numbers, coefficients: Sequence[float]) -> Numbers:
    """Return the values of a polynomial, by Horner's rule. Two roundings per coefficient, since a
    fused product and sum would depend on the processor."""
    value = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        value += coefficient
        value *= x
    value += coefficients[-1]
    return value

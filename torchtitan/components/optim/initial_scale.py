"""`InitialScale`: multiply initial values of parameters selected by name."""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from torchtitan.protocols.converter import ModelConverter
from torchtitan.protocols.initializer import (
    Constant,
    Initializer,
    TruncatedNormal,
    initializers_of,
    with_initializers,
)
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.patterns import check_pattern


@dataclass(kw_only=True, slots=True)
class Scale:
    """A factor of the initial values of the parameters whose names match a pattern."""

    pattern: str
    """Regular expression, searched in the parameter's name (layers.0.attention.wq.weight)."""

    factor: float
    """Multiplies the standard deviation of a normal distribution, or a constant."""


class InitialScale(ModelConverter):
    """Multiplies initial values, also of weights that exist only after they are sharded. Weights
    that a run loads keep their values."""

    run_options = frozenset({"scales"})

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        """Initial values relative to the family's."""

        scales: dict[str, Scale] = field(default_factory=dict)
        """Factors of parameters selected by name; the first pattern that matches counts."""

        def validate(self) -> None:
            for key, scale in self.scales.items():
                option = f"{self.option}.scales.{key}"
                check_pattern(f"{option}.pattern", scale.pattern)
                is_valid = 0 < scale.factor < math.inf
                require(is_valid, f"{option}.factor", scale.factor, "a number above 0")

    config: Config

    def convert(self, model: nn.Module) -> None:
        """Multiply the initial values. Raise `UserError` for a distribution that is neither normal
        nor constant."""
        scales = list(self.config.scales.values())
        for module_name, module in model.named_modules():
            initializers = initializers_of(module)
            for name, _ in module.named_parameters(recurse=False):
                full_name = f"{module_name}.{name}"
                if (factor := _factor_of(full_name, scales)) != 1.0 and name in initializers:
                    initializers[name] = _scaled(initializers[name], factor, full_name)
            if initializers:
                with_initializers(module, **initializers)


def _factor_of(name: str, scales: Sequence[Scale]) -> float:
    return next((scale.factor for scale in scales if re.search(scale.pattern, name)), 1.0)


def _scaled(initializer: Initializer, factor: float, name: str) -> Initializer:
    match initializer:
        case TruncatedNormal():
            return dataclasses.replace(initializer, std=initializer.std * factor)
        case Constant():
            return Constant(initializer.value * factor)
    raise UserError(
        f"--model_converters.initialscale: the initial values of {name} are "
        f"{type(initializer).__name__}; only normal and constant ones can be scaled"
    )

"""`InitialScale`: multiply initial values of parameters selected by name."""

import dataclasses
import math
import re
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
    """Initial values of the parameters whose names match a pattern."""

    pattern: str
    """Regular expression, searched in the parameter's name (layers.0.attention.wq.weight)."""

    factor: float = 1.0
    """Multiplies the standard deviation of a normal distribution, or a constant."""

    std: float | None = None
    """Standard deviation of a normal distribution, before `factor`. None: the family's."""


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
                for name, value in {"factor": scale.factor, "std": scale.std}.items():
                    is_valid = value is None or 0 < value < math.inf
                    require(is_valid, f"{option}.{name}", value, "a number above 0")

    config: Config

    def convert(self, model: nn.Module) -> None:
        """Multiply the initial values. Raise `UserError` for a distribution that is neither normal
        nor constant, and for the standard deviation of a constant."""
        scales = list(self.config.scales.values())
        for module_name, module in model.named_modules():
            initializers = initializers_of(module)
            for name, _ in module.named_parameters(recurse=False):
                full_name = f"{module_name}.{name}"
                scale = next((one for one in scales if re.search(one.pattern, full_name)), None)
                if scale is None or (scale.factor, scale.std) == (1.0, None):
                    continue
                if name in initializers:
                    initializers[name] = _scaled(initializers[name], scale, full_name)
            if initializers:
                with_initializers(module, **initializers)


def _scaled(initializer: Initializer, scale: Scale, name: str) -> Initializer:
    match initializer:
        case TruncatedNormal():
            std = initializer.std if scale.std is None else scale.std
            return dataclasses.replace(initializer, std=std * scale.factor)
        case Constant() if scale.std is None:
            return Constant(initializer.value * scale.factor)
    possible = "normal and constant ones can be scaled" if scale.std is None else "normal ones can"
    raise UserError(
        f"--model_converters.initialscale: the initial values of {name} are "
        f"{type(initializer).__name__}; only {possible}"
    )

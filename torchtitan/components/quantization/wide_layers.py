"""Which layers stay wide if products are narrow: shared by converters to 8 and 4 bits."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from torchtitan.config.configurable import builds
from torchtitan.protocols.converter import LayerConverter
from torchtitan.protocols.experts import StackedExperts
from torchtitan.tools.errors import require


class NarrowConverter(LayerConverter):
    """Base class of converters whose products are narrower than weights, gradients and optimizer.
    The head, which the loss reads, is never converted."""

    alignment: ClassVar[int]
    """Divisor of the inputs and outputs of a converted layer."""

    layer_types = (nn.Linear, StackedExperts)

    @dataclass(kw_only=True, slots=True)
    class Config(LayerConverter.Config):
        """Layers to convert."""

        min_features: int = 2048
        """Skip layers with fewer inputs or outputs: casting costs more than their products gain."""

        @builds(lambda: NarrowConverter)
        def build(self) -> object:
            """Build the converter."""

        def validate(self) -> None:
            LayerConverter.Config.validate(self)
            require(
                self.min_features >= 0,
                f"{self.option}.min_features",
                self.min_features,
                "at least 0",
            )

    config: Config

    def has_kernels(self, layer: nn.Module) -> bool:
        """Return whether some devices have kernels for the products of a selected layer."""
        return True

    def reason_to_skip(self, name: str, layer: nn.Module) -> str:
        if isinstance(layer, StackedExperts) and layer.is_transposed:
            return "weights without a row for each output"
        if any(side % self.alignment for side in sides_of(layer)):
            return f"inputs or outputs not a multiple of {self.alignment}"
        config = self.config
        is_small = min(sides_of(layer)) < config.min_features
        return (
            f"fewer than {config.min_features} inputs or outputs ({config.option}.min_features)"
            if is_small
            else ""
        )


def sides_of(layer: nn.Module) -> list[int]:
    """Return the inputs and outputs of all matrices of a linear layer or of experts."""
    if isinstance(layer, nn.Linear):
        return [layer.in_features, layer.out_features]
    assert isinstance(layer, StackedExperts)
    return [side for name in layer.matrices for side in layer.get_parameter(name).shape[-2:]]

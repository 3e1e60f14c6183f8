"""`QAT`: quantization-aware training, which simulates the rounding of the quantized model.

The scheme is torchao's int8 dynamic activations and int4 weights, computed in the tensor's dtype
and rounded half to even:

- a matrix of weights in groups of `group_size` neighbors within a row. Scale s = max |w| / 7.5; w
  becomes s clamp(round(w / s), -8, 7);
- activations token by token, with low = min(0, min x) and high = max(0, max x) over a token's
  features. Scale s = (high - low) / 255, zero point z = clamp(-128 - round(low / s), -128, 127); x
  becomes s (clamp(round(x / s) + z, -128, 127) - z).

In the backward pass, rounding is the identity, and clamped values get no gradient (the
straight-through estimator, arXiv:1308.3432). Weights and optimizer states stay in full precision,
and checkpoints are the plain model's.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchtitan.config.configurable import config_key
from torchtitan.protocols.converter import LayerConverter
from torchtitan.protocols.initializer import initializers_of, with_initializers
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.logging import logger
from torchtitan.tools.patterns import without_numbers
from torchtitan.tools.torchao import check_torchao, import_torchao

if TYPE_CHECKING:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig


class QAT(LayerConverter):
    """Simulates quantization in linear layers, so that training adapts to it."""

    simulates = True

    @dataclass(kw_only=True, slots=True)
    class Config(LayerConverter.Config):
        """Layers, granularity and start of simulated quantization."""

        group_size: int = 32
        """Neighboring weights of a row that share a scale; must divide the inputs of each layer."""

        start_step: int = 0
        """Steps trained before quantization is simulated."""

        def validate(self) -> None:
            LayerConverter.Config.validate(self)
            require(
                self.group_size >= 2, f"{self.option}.group_size", self.group_size, "at least 2"
            )
            require(
                self.start_step >= 0, f"{self.option}.start_step", self.start_step, "at least 0"
            )

    config: Config

    def select(self, model: nn.Module) -> dict[str, nn.Module]:
        selected: dict[str, Any] = super().select(model)
        size = self.config.group_size
        if indivisible := {
            name: layer.in_features for name, layer in selected.items() if layer.in_features % size
        }:
            sizes = ", ".join(map(str, sorted({*indivisible.values()})))
            raise UserError(
                f"{self.config.option}.group_size {size} does not divide the inputs ({sizes}) of "
                f"{', '.join(without_numbers(indivisible))}; set another size, or exclude these "
                f"layers ({self.config.option}.exclude)"
            )
        return selected

    def convert_layer(self, name: str, layer: nn.Module) -> nn.Module:
        scheme = inference_config(self.config.group_size)
        from torchao.quantization import quantize_
        from torchao.quantization.qat import QATConfig

        holder = nn.ModuleDict({"layer": layer})  # torchao replaces only submodules
        quantize_(holder, QATConfig(scheme, step="prepare"))
        converted = holder["layer"]
        # On the meta device, torchao creates new, unfrozen parameters.
        converted.weight, converted.bias = layer.weight, layer.bias
        _simulate(converted, self.config.start_step == 0)
        return with_initializers(converted, **initializers_of(layer))

    def pre_step_hook(self, model_parts: list[nn.Module], step: int) -> None:
        """Simulate quantization only after `start_step`; validation computes like the last step."""
        start_step = self.config.start_step
        for part in model_parts:
            _simulate(part, step > start_step)
        if start_step and step == start_step + 1:
            logger.info("%s: simulating quantization from step %d", config_key(self.config), step)


def _simulate(module: nn.Module, enabled: bool) -> None:
    from torchao.quantization.qat.linear import enable_linear_fake_quant

    module.apply(functools.partial(enable_linear_fake_quant, enabled=enabled))


def inference_config(group_size: int) -> "Int8DynamicActivationIntxWeightConfig":
    """Return torchao's config for training and export. Raise `UserError` if torchao is not
    installed."""
    check_torchao("quantization to 4-bit weights and 8-bit activations")
    library = import_torchao("torchao.quantization")
    int4 = torch.int4  # type: ignore[attr-defined]
    scheme: Int8DynamicActivationIntxWeightConfig = library.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=int4, weight_granularity=library.PerGroup(group_size)
    )
    return scheme

"""`LayerConverter`: a converter that puts another layer in the place of each that is chosen by name."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from torchtitan.config.configurable import config_key
from torchtitan.protocols.model_converter import ModelConverter
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.patterns import check_choice, choose, without_numbers

_HEAD = "output"
"""The layer whose weights a model hands to its loss, which is why it is never called (`Decoder.output_weight`)."""

_CONVERTED_BY = "converted_by"
"""Attribute of a layer that a converter has made: the converter's name."""


class LayerConverter(ModelConverter):
    """Replaces layers, chosen by patterns in their names; a subclass says in `convert_layer` by what.

    A layer is converted once: of two converters that choose the same one, the second is refused by name.
    """

    layer_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)
    """The layers that can be converted, of exactly these classes."""

    converts_head: ClassVar[bool] = False
    """Whether the output head can be converted too, although it is never called."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        """Which layers are converted."""

        include: list[str] = field(default_factory=lambda: [r"."])
        """Regular expressions, each searched in the layers' names (layers.0.attention.wq): what they find is
        converted."""

        exclude: list[str] = field(default_factory=list)
        """Regular expressions: layers whose names they find are not converted."""

        def validate(self) -> None:
            """Raise `UserError` for what is no regular expression, and where nothing is included."""
            option = f"--model_converters.{config_key(self)}"
            check_choice(option, self.include, self.exclude, "nothing would be converted")

    config: Config

    def check_model(self, model: nn.Module) -> None:
        """Convert the model that is thrown away.

        Raises:
            UserError: as `convert`.
        """
        self._replace(model)

    def convert(self, model: nn.Module) -> None:
        """Replace the chosen layers of a model on the meta device, in place, and log which they are.

        Raises:
            UserError: where a pattern finds no layer, nothing is left to convert, or another converter has been here.
        """
        chosen = self._replace(model)
        others = [name for name, module in model.named_modules() if _has_weights(module) and name not in chosen]
        key, remaining = config_key(self.config), _in_words(others) or "none"
        logger.info("%s: %d layers converted: %s; as they were: %s", key, len(chosen), _in_words(chosen), remaining)

    def _replace(self, model: nn.Module) -> list[str]:
        chosen = self.select(model)
        for name, layer in chosen.items():
            converted = self.convert_layer(name, layer)
            setattr(converted, _CONVERTED_BY, config_key(self.config))
            model.set_submodule(name, converted, strict=True)
        return list(chosen)

    def select(self, model: nn.Module) -> dict[str, nn.Module]:
        """The layers that the patterns choose, by name.

        Raises:
            UserError: as `convert`.
        """
        config, key = self.config, config_key(self.config)
        layers = {name: module for name, module in model.named_modules() if isinstance(module, self.layer_types)}
        if not self.converts_head:
            layers.pop(_HEAD, None)
        tied = self.converts_head and getattr(model, _HEAD, layers) is None
        kind = f"layers (the head is tied to the embedding, so that there is no '{_HEAD}')" if tied else "layers"
        names = choose(f"--model_converters.{key}", config.include, config.exclude, list(layers), kind)
        chosen = {name: layers[name] for name in names}
        for name, layer in chosen.items():
            if type(layer) not in self.layer_types:
                other = converter_of(layer) or type(layer).__name__
                raise UserError(
                    f"model_converters: {name} is converted by {other} already, and {key} does not go on top of that; "
                    f"exclude it from one of the two (--model_converters.{key}.exclude)"
                )
        chosen = {name: layer for name, layer in chosen.items() if self.accepts(name, layer)}
        if not chosen:
            raise UserError(f"--model_converters.{key}: nothing to convert is left of the layers {_in_words(layers)}")
        return chosen

    def accepts(self, name: str, layer: nn.Module) -> bool:
        """Whether a layer that the patterns choose is one to convert; a subclass that leaves out some overrides this.

        Raises:
            UserError: for one that cannot be converted, and should not be passed over in silence.
        """
        return True

    @abstractmethod
    def convert_layer(self, name: str, layer: nn.Module) -> nn.Module:
        """What takes the place of `layer`, which is called `name`. On the meta device, and with the initial
        distributions of its parameters (`torchtitan.protocols.initializer`)."""


def converter_of(layer: nn.Module) -> str | None:
    """The name of the converter that has made `layer`: what its options begin with."""
    return getattr(layer, _CONVERTED_BY, None)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _in_words(names: Iterable[str]) -> str:
    return ", ".join(without_numbers(names))

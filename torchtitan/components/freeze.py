"""`Freeze`: parameters that are not trained, chosen by name."""

from dataclasses import dataclass, field

from torch import nn

from torchtitan.config.configurable import config_key
from torchtitan.protocols.model_converter import ModelConverter
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.patterns import check_choice, choose, without_numbers


class Freeze(ModelConverter):
    """Keeps the parameters that the patterns choose as they are: they get no gradient and no optimizer state."""

    freezes = True

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        """Which parameters are frozen."""

        include: list[str] = field(default_factory=list)
        """Regular expressions, each searched in the parameters' names (layers.0.attention.wq.weight): what they find is
        frozen."""

        exclude: list[str] = field(default_factory=list)
        """Regular expressions: parameters whose names they find are trained nevertheless."""

        def validate(self) -> None:
            """Raise `UserError` for what is no regular expression, and where nothing is included."""
            consequence = "nothing would be frozen; give patterns of parameters' names (^tok_embeddings)"
            check_choice(f"--model_converters.{config_key(self)}", self.include, self.exclude, consequence)

    config: Config

    def check_model(self, model: nn.Module) -> None:
        """Freeze the parameters of the model that is thrown away; raises as `convert`."""
        self._freeze(model)

    def convert(self, model: nn.Module) -> None:
        """Freeze the chosen parameters in place, and log their names; `UserError` if a pattern finds none, or none is
        left to freeze."""
        frozen = self._freeze(model)
        n_frozen = sum(parameter.numel() for parameter in frozen.values())
        n_all = sum(parameter.numel() for parameter in model.parameters())
        names = ", ".join(without_numbers(frozen))
        logger.info("%s: %s of %s parameters frozen: %s", config_key(self.config), f"{n_frozen:,}", f"{n_all:,}", names)

    def _freeze(self, model: nn.Module) -> dict[str, nn.Parameter]:
        config, option = self.config, f"--model_converters.{config_key(self.config)}"
        parameters = dict(model.named_parameters())
        names = choose(option, config.include, config.exclude, list(parameters), "parameters")
        frozen = {name: parameters[name] for name in names}
        if not frozen:
            raise UserError(f"{option}: nothing to freeze is left, exclude finds all that include finds")
        for parameter in frozen.values():
            parameter.requires_grad_(False)
        return frozen

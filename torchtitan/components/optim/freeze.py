"""`Freeze`: freeze parameters selected by name."""

import logging
from dataclasses import dataclass, field

from torch import nn

from torchtitan.config.configurable import config_key
from torchtitan.protocols.converter import ModelConverter
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger, without_logs
from torchtitan.tools.patterns import check_choice, choose, without_numbers


class Freeze(ModelConverter):
    """Freezes the parameters selected by patterns: they get no gradient and no optimizer state."""

    freezes = True

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        """Parameters to freeze."""

        include: list[str] = field(default_factory=list)
        """Regular expressions searched in parameter names (layers.0.attention.wq.weight); matches
        are frozen."""

        exclude: list[str] = field(default_factory=list)
        """Regular expressions searched in parameter names; matches are trained even if included."""

        def validate(self) -> None:
            consequence = (
                "nothing would be frozen; set patterns of parameter names (^tok_embeddings)"
            )
            check_choice(self.option, self.include, self.exclude, consequence)

    config: Config

    def check_model(self, model: nn.Module) -> None:
        with without_logs(logging.INFO):
            self.convert(model)

    def convert(self, model: nn.Module) -> None:
        config, option = self.config, self.config.option
        parameters = dict(model.named_parameters())
        frozen = choose(option, config.include, config.exclude, list(parameters), "parameters")
        if not frozen:
            raise UserError(
                f"{option}: nothing to freeze, since exclude matches all included parameters; "
                "change one"
            )
        for name in frozen:
            parameters[name].requires_grad_(False)
        n_frozen = sum(parameters[name].numel() for name in frozen)
        n_total = sum(parameter.numel() for parameter in parameters.values())
        names = ", ".join(without_numbers(frozen))
        logger.info(
            "%s: %s of %s parameters frozen: %s",
            config_key(config),
            f"{n_frozen:,}",
            f"{n_total:,}",
            names,
        )

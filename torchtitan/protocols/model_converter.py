"""`ModelConverter`: a rewrite of a model's modules that composes with everything else."""

from dataclasses import dataclass

from torch import nn

from torchtitan.config import Configurable


class ModelConverter(Configurable):
    """Rewrites modules in place. Listed in `Trainer.Config.model_converters`, applied in that order.

    Each hook does nothing unless a subclass overrides it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """A converter's options: `--model_converters.<class name in lower case>.<field>`."""

    def convert(self, model: nn.Module) -> None:
        """Called once after construction on the meta device, before any parallelisation."""

    def post_init_hook(self, model_parts: list[nn.Module]) -> None:
        """Called once before training, when weights have been initialised, and loaded where there was a checkpoint."""

    def post_optimizer_hook(self, model_parts: list[nn.Module]) -> None:
        """Called after each optimizer step."""

"""Training configurations of Granite: `--module granite --config debugmodel`."""

from torchtitan.models.common.recipes import published, small_run
from torchtitan.models.granite import FAMILY, model_registry
from torchtitan.trainer import Trainer


def granite_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


granite_2b = published(FAMILY, "3.3-2B", "granite-3.3-2b-base", lr=4e-4, local_batch_size=4)
granite_3b = published(FAMILY, "4.0-micro", "granite-4.0-micro-base", lr=4e-4, local_batch_size=2)
granite_8b = published(FAMILY, "3.3-8B", "granite-3.3-8b-base", lr=3e-4, local_batch_size=2)

"""Training configurations of Gemma 4: `--module gemma4 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small_run
from torchtitan.models.gemma4 import FAMILY, model_registry
from torchtitan.trainer import Trainer


def gemma4_debugmodel() -> Trainer.Config:
    """A small Gemma 4 on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


gemma4_12b = published(FAMILY, "12B", "gemma-4-12B", lr=3e-4, local_batch_size=2)

"""Training configurations of SmolLM3: `--module smollm3 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small_run
from torchtitan.models.smollm3 import FAMILY, model_registry
from torchtitan.trainer import Trainer


def smollm3_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


smollm3_3b = published(FAMILY, "3B", "SmolLM3-3B-Base", lr=4e-4, local_batch_size=2)

"""Training configurations of Mistral: `--module mistral --config debugmodel`."""

from torchtitan.models.common.recipes import published, small_run
from torchtitan.models.mistral import FAMILY, model_registry
from torchtitan.trainer import Trainer


def mistral_debugmodel() -> Trainer.Config:
    """A small model with windows of 64 tokens on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


mistral_7b = published(FAMILY, "7B-v0.3", "Mistral-7B-v0.3", lr=3e-4, local_batch_size=2)

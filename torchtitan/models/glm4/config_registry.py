"""Training configurations of GLM-4: `--module glm4 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small_run
from torchtitan.models.glm4 import FAMILY, model_registry
from torchtitan.trainer import Trainer


def glm4_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


glm4_9b = published(FAMILY, "9B-0414", "GLM-4-9B-0414", lr=3e-4, local_batch_size=2)
glm4_32b = published(FAMILY, "32B-0414", "GLM-4-32B-0414", lr=1.5e-4, local_batch_size=1)

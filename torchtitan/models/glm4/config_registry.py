"""Training configurations of GLM-4: `--module glm4 --config debugmodel`."""

from torchtitan.models.common.recipes import large_run, small_run
from torchtitan.models.glm4 import model_registry
from torchtitan.trainer import Trainer


def glm4_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


def glm4_9b() -> Trainer.Config:
    """GLM-4 9B of April 2025."""
    return large_run(model_registry("9B-0414"), "./assets/hf/GLM-4-9B-0414", lr=3e-4, local_batch_size=2)


def glm4_32b() -> Trainer.Config:
    """GLM-4 32B of April 2025."""
    return large_run(model_registry("32B-0414"), "./assets/hf/GLM-4-32B-0414", lr=1.5e-4, local_batch_size=1)

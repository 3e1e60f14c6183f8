"""Training configurations of GLM-4.5: `--module glm4_moe --config debugmodel`."""

from torchtitan.models.common.recipes import balanced, large_run, small_run
from torchtitan.models.glm4_moe import model_registry
from torchtitan.trainer import Trainer


def glm4_moe_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: a few minutes on two CPU cores, no network."""
    return balanced(small_run(model_registry("debugmodel")))


def glm4_moe_106b() -> Trainer.Config:
    """GLM-4.5-Air."""
    return balanced(large_run(model_registry("4.5-Air-106B"), "./assets/hf/GLM-4.5-Air", lr=2e-4, local_batch_size=1))

"""Training configurations of gpt-oss: `--module gpt_oss --config debugmodel`."""

from torchtitan.models.common.recipes import balanced, small_run
from torchtitan.models.gpt_oss import model_registry
from torchtitan.trainer import Trainer


def gpt_oss_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: a few minutes on two CPU cores, no network."""
    return balanced(small_run(model_registry("debugmodel")))

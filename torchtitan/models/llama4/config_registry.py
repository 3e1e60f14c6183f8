"""Training configurations of Llama 4: `--module llama4 --config debugmodel`."""

from torchtitan.models.common.recipes import balanced, small_run
from torchtitan.models.llama4 import model_registry
from torchtitan.trainer import Trainer


def llama4_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: a few minutes on two CPU cores, no network."""
    return balanced(small_run(model_registry("debugmodel")))

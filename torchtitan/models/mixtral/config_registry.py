"""Training configurations of Mixtral: `--module mixtral --config debugmodel`."""

from torchtitan.models.common.recipes import balanced, large_run, small_run
from torchtitan.models.mixtral import model_registry
from torchtitan.trainer import Trainer


def mixtral_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: a few minutes on two CPU cores, no network."""
    return balanced(small_run(model_registry("debugmodel")))


def mixtral_8x7b() -> Trainer.Config:
    """Mixtral 8x7B."""
    run = large_run(model_registry("8x7B"), "./assets/hf/Mixtral-8x7B-v0.1", lr=1.5e-4, local_batch_size=1)
    return balanced(run)

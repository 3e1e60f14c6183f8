"""Training configurations of Granite: `--module granite --config debugmodel`."""

from torchtitan.models.common.recipes import large_run, small_run
from torchtitan.models.granite import model_registry
from torchtitan.trainer import Trainer


def granite_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


def granite_2b() -> Trainer.Config:
    """Granite 3.3 2B."""
    return large_run(model_registry("3.3-2B"), "./assets/hf/granite-3.3-2b-base", lr=4e-4, local_batch_size=4)


def granite_3b() -> Trainer.Config:
    """Granite 4.0 Micro."""
    return large_run(model_registry("4.0-micro"), "./assets/hf/granite-4.0-micro-base", lr=4e-4, local_batch_size=2)


def granite_8b() -> Trainer.Config:
    """Granite 3.3 8B."""
    return large_run(model_registry("3.3-8B"), "./assets/hf/granite-3.3-8b-base", lr=3e-4, local_batch_size=2)

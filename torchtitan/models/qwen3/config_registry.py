"""Training configurations of Qwen3: `--module qwen3 --config debugmodel`."""

from torchtitan.models.common.recipes import large_run, small_run
from torchtitan.models.qwen3 import model_registry
from torchtitan.trainer import Trainer


def qwen3_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


def qwen3_600m() -> Trainer.Config:
    """Qwen3 0.6B."""
    return large_run(model_registry("0.6B"), "./assets/hf/Qwen3-0.6B", lr=4e-4, local_batch_size=4)


def qwen3_4b() -> Trainer.Config:
    """Qwen3 4B."""
    return large_run(model_registry("4B"), "./assets/hf/Qwen3-4B", lr=4e-4, local_batch_size=2)


def qwen3_8b() -> Trainer.Config:
    """Qwen3 8B."""
    return large_run(model_registry("8B"), "./assets/hf/Qwen3-8B", lr=3e-4, local_batch_size=2)


def qwen3_32b() -> Trainer.Config:
    """Qwen3 32B."""
    return large_run(model_registry("32B"), "./assets/hf/Qwen3-32B", lr=1.5e-4, local_batch_size=1)

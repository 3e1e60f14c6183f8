"""Training configurations of Qwen3: `--module qwen3 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small_run
from torchtitan.models.qwen3 import FAMILY, model_registry
from torchtitan.trainer import Trainer


def qwen3_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


qwen3_600m = published(FAMILY, "0.6B", "Qwen3-0.6B", lr=4e-4, local_batch_size=4)
qwen3_4b = published(FAMILY, "4B", "Qwen3-4B", lr=4e-4, local_batch_size=2)
qwen3_8b = published(FAMILY, "8B", "Qwen3-8B", lr=3e-4, local_batch_size=2)
qwen3_32b = published(FAMILY, "32B", "Qwen3-32B", lr=1.5e-4, local_batch_size=1)

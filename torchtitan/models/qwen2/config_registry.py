"""Training configurations of Qwen2 and Qwen2.5: `--module qwen2 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small_run
from torchtitan.models.qwen2 import FAMILY, model_registry
from torchtitan.trainer import Trainer


def qwen2_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


qwen2_500m = published(FAMILY, "2.5-0.5B", "Qwen2.5-0.5B", lr=4e-4, local_batch_size=4)
qwen2_7b = published(FAMILY, "2.5-7B", "Qwen2.5-7B", lr=3e-4, local_batch_size=2)

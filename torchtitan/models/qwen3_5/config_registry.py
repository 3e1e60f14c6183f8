"""Training configurations of Qwen3.5: `--module qwen3_5 --config debugmodel`."""

from torchtitan.models.common.recipes import balanced, published, small_run
from torchtitan.models.qwen3_5 import FAMILY, model_registry
from torchtitan.trainer import Trainer


def qwen3_5_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories, three of four layers gated delta nets: a few minutes on two CPU cores, no
    network."""
    return small_run(model_registry("debugmodel"))


def qwen3_5_moe_debugmodel() -> Trainer.Config:
    """A small model with experts on the built-in stories: a few minutes on two CPU cores, no network."""
    return balanced(small_run(model_registry("moe-debugmodel")))


qwen3_5_800m = published(FAMILY, "0.8B", "Qwen3.5-0.8B", lr=4e-4, local_batch_size=4)
qwen3_5_4b = published(FAMILY, "4B", "Qwen3.5-4B", lr=4e-4, local_batch_size=2)
qwen3_5_9b = published(FAMILY, "9B", "Qwen3.5-9B", lr=3e-4, local_batch_size=2)

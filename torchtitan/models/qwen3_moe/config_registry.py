"""Training configurations of Qwen3 with experts: `--module qwen3_moe --config debugmodel`."""

from torchtitan.models.common.recipes import balanced, large_run, small_run
from torchtitan.models.qwen3_moe import model_registry
from torchtitan.trainer import Trainer


def qwen3_moe_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: a few minutes on two CPU cores, no network."""
    return balanced(small_run(model_registry("debugmodel")))


def qwen2_moe_debugmodel() -> Trainer.Config:
    """A small model with a shared expert on the built-in stories: a few minutes on two CPU cores, no network."""
    return balanced(small_run(model_registry("2-debugmodel")))


def qwen3_moe_30b() -> Trainer.Config:
    """Qwen3 30B-A3B."""
    run = large_run(model_registry("30B-A3B"), "./assets/hf/Qwen3-30B-A3B", lr=3e-4, local_batch_size=1)
    return balanced(run)

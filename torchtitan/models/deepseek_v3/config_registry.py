"""Training configurations of DeepSeek-V3: `--module deepseek_v3 --config debugmodel`."""

from torchtitan.models.common.recipes import balanced, large_run, small_run
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.trainer import Trainer


def deepseek_v3_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: a few minutes on two CPU cores, no network."""
    return balanced(small_run(model_registry("debugmodel")))


def deepseek_v3_671b() -> Trainer.Config:
    """DeepSeek-V3."""
    return balanced(large_run(model_registry("V3-671B"), "./assets/hf/DeepSeek-V3", lr=2.2e-4, local_batch_size=1))

"""Training configurations of Phi-3 and Phi-4: `--module phi3 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small_run
from torchtitan.models.phi3 import FAMILY, model_registry
from torchtitan.trainer import Trainer


def phi3_debugmodel() -> Trainer.Config:
    """A small model with windows and LongRoPE on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


phi3_mini = published(FAMILY, "3-mini-4k", "Phi-3-mini-4k-instruct", lr=4e-4, local_batch_size=2, seq_len=4096)
phi3_4 = published(FAMILY, "4", "phi-4", lr=3e-4, local_batch_size=1)

"""Training configurations of Phi-3 and Phi-4: `--module phi3 --config debugmodel`."""

from torchtitan.models.common.recipes import large_run, small_run
from torchtitan.models.phi3 import model_registry
from torchtitan.trainer import Trainer


def phi3_debugmodel() -> Trainer.Config:
    """A small model with windows and LongRoPE on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


def phi3_mini() -> Trainer.Config:
    """Phi-3-mini with a context of 4096 tokens."""
    return large_run(
        model_registry("3-mini-4k"), "./assets/hf/Phi-3-mini-4k-instruct", lr=4e-4, local_batch_size=2, seq_len=4096
    )


def phi3_4() -> Trainer.Config:
    """Phi-4."""
    return large_run(model_registry("4"), "./assets/hf/phi-4", lr=3e-4, local_batch_size=1)

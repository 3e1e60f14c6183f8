"""Training configurations of OLMo 2 and 3: `--module olmo --config debugmodel`."""

from torchtitan.models.common.recipes import large_run, small_run
from torchtitan.models.olmo import model_registry
from torchtitan.trainer import Trainer


def olmo_debugmodel() -> Trainer.Config:
    """A small OLMo 3 with windows of 64 tokens on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


def olmo_1b() -> Trainer.Config:
    """OLMo 2 1B."""
    return large_run(model_registry("2-1B"), "./assets/hf/OLMo-2-0425-1B", lr=4e-4, local_batch_size=8, seq_len=4096)


def olmo_7b() -> Trainer.Config:
    """OLMo 3 7B."""
    return large_run(model_registry("3-7B"), "./assets/hf/Olmo-3-1025-7B", lr=3e-4, local_batch_size=2)


def olmo_32b() -> Trainer.Config:
    """OLMo 3 32B."""
    return large_run(model_registry("3-32B"), "./assets/hf/Olmo-3-1125-32B", lr=1.5e-4, local_batch_size=1)

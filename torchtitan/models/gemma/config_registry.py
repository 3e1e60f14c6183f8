"""Training configurations of Gemma: `--module gemma --config debugmodel`."""

from torchtitan.models.common.recipes import large_run, small_run
from torchtitan.models.gemma import model_registry
from torchtitan.trainer import Trainer


def gemma_debugmodel() -> Trainer.Config:
    """A small Gemma 3 (windows) on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


def gemma2_debugmodel() -> Trainer.Config:
    """A small Gemma 2 (windows, soft caps) on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("2-debugmodel"))


def gemma2_2b() -> Trainer.Config:
    """Gemma 2 2B."""
    return large_run(model_registry("2-2B"), "./assets/hf/gemma-2-2b", lr=4e-4, local_batch_size=4)


def gemma2_9b() -> Trainer.Config:
    """Gemma 2 9B."""
    return large_run(model_registry("2-9B"), "./assets/hf/gemma-2-9b", lr=3e-4, local_batch_size=2)


def gemma3_270m() -> Trainer.Config:
    """Gemma 3 270M."""
    return large_run(model_registry("3-270M"), "./assets/hf/gemma-3-270m", lr=4e-4, local_batch_size=4)


def gemma3_1b() -> Trainer.Config:
    """Gemma 3 1B."""
    return large_run(model_registry("3-1B"), "./assets/hf/gemma-3-1b-pt", lr=4e-4, local_batch_size=4)


def gemma3_4b() -> Trainer.Config:
    """The text model of Gemma 3 4B."""
    return large_run(model_registry("3-4B"), "./assets/hf/gemma-3-4b-pt", lr=4e-4, local_batch_size=2)


def gemma3_12b() -> Trainer.Config:
    """The text model of Gemma 3 12B."""
    return large_run(model_registry("3-12B"), "./assets/hf/gemma-3-12b-pt", lr=3e-4, local_batch_size=2)


def gemma3_27b() -> Trainer.Config:
    """The text model of Gemma 3 27B."""
    return large_run(model_registry("3-27B"), "./assets/hf/gemma-3-27b-pt", lr=1.5e-4, local_batch_size=1)

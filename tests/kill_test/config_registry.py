"""The configuration of the kill test's runs; `tests.kill_test.modes` has their other options."""

import dataclasses

from tests.kill_test.trainer import NoisyTrainer
from torchtitan.models.llama3.config_registry import llama3_debugmodel


def noisy_debugmodel() -> NoisyTrainer.Config:
    """The small Llama 3, trained by `NoisyTrainer`."""
    base = llama3_debugmodel()
    return NoisyTrainer.Config(
        **{field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    )

"""Configurations of this experiment."""

import dataclasses

from torchtitan.models.common.recipes import small_run
from torchtitan.models.llama3 import model_registry

from .trainer import MicroBatchClippingTrainer


def gradient_aggregation_debugmodel() -> MicroBatchClippingTrainer.Config:
    """The small Llama 3 on the built-in stories, in four micro-batches per step."""
    config = small_run(model_registry("debugmodel"), MicroBatchClippingTrainer.Config)
    config.training = dataclasses.replace(config.training, local_batch_size=2, global_batch_size=8)
    return config

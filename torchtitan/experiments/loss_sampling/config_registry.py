"""Configurations of this experiment."""

import dataclasses

from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel_sft
from torchtitan.trainer import Trainer

from .sampler import LossSampler


def loss_sampling_debugmodel() -> Trainer.Config:
    """Train the small Llama 3 on the built-in conversations, drawing conversations with a high loss
    more often."""
    config = llama3_debugmodel_sft()
    assert isinstance(config.dataloader, SFTDataLoader.Config)
    # With small chunks, the losses of a step take effect sooner.
    config.dataloader = dataclasses.replace(
        config.dataloader, sampler=LossSampler.Config(), pack_chunk=128
    )
    return config

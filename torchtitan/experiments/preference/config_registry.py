"""Configurations of training on preferences."""

import dataclasses
from types import ModuleType

from torchtitan.components.data.finetuning.preference import PreferenceDataLoader
from torchtitan.components.optimizer import Optimizer
from torchtitan.models.auto.config_registry import sft
from torchtitan.trainer import Trainer

from .trainer import DPOTrainer


def dpo(hf_assets_path: str, family: ModuleType | None = None) -> DPOTrainer.Config:
    """Direct preference optimization of the model in a Hugging Face folder: `--dataloader.dataset pairs.jsonl`."""
    config = sft(hf_assets_path, family)
    return with_preferences(dataclasses.replace(config, optimizer=Optimizer.Config(lr=5e-7, weight_decay=0.0)))


def with_preferences(config: Trainer.Config) -> DPOTrainer.Config:
    """Return `config` for user-supplied preferences."""
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return DPOTrainer.Config(**{**sections, "dataloader": PreferenceDataLoader.Config(dataset=[])})

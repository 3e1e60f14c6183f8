"""Configurations of reward models."""

from types import ModuleType

from torchtitan.components.data.finetuning.preference import RewardDataLoader
from torchtitan.models.auto.config_registry import sft

from .trainer import RewardTrainer


def bradley_terry(hf_assets_path: str, family: ModuleType | None = None) -> RewardTrainer.Config:
    """Reward model from the model in a Hugging Face folder, without its head: `--dataloader.dataset
    pairs.jsonl`."""
    config = sft(hf_assets_path, family)
    config.model_spec.model.scores = True
    return RewardTrainer.Config.based_on(config, dataloader=RewardDataLoader.Config())

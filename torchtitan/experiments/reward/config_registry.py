"""Configurations of reward models."""

from types import ModuleType

from torchtitan.components.data.finetuning.preference import RewardDataLoader
from torchtitan.components.peft import LoRA
from torchtitan.models.auto.config_registry import sft
from torchtitan.models.common.recipes import with_adapters

from .trainer import RewardTrainer


def bradley_terry(hf_assets_path: str, family: ModuleType | None = None) -> RewardTrainer.Config:
    """Reward model from the model in a Hugging Face folder, without its head: `--dataloader.dataset
    pairs.jsonl`."""
    config = sft(hf_assets_path, family)
    config.model_spec.model.scores = True
    return RewardTrainer.Config.based_on(config, dataloader=RewardDataLoader.Config())


def reward_lora(hf_assets_path: str, family: ModuleType | None = None) -> RewardTrainer.Config:
    """As `bradley_terry`, for low-rank adapters. The head has one row, so an adapter of rank 1 may
    become any head."""
    adapters = LoRA.Config(rank_pattern=["head.output=1"], alpha_pattern=["head.output=1"])
    adapters.include = [*adapters.include, r"^head\.output$"]
    return with_adapters(bradley_terry(hf_assets_path, family), adapters)

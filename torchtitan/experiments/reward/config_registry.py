"""Configurations of reward models."""

from types import ModuleType

from torchtitan.components.data.finetuning.preference import RewardDataLoader
from torchtitan.components.images.preference import ImageRewardDataLoader
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.models.auto.config_registry import sft, sft_images
from torchtitan.models.common.recipes import with_adapters
from torchtitan.trainer import Trainer

from .trainer import RewardTrainer


def bradley_terry(hf_assets_path: str, family: ModuleType | None = None) -> RewardTrainer.Config:
    """Reward model from the model in a Hugging Face folder, without its head: `--dataloader.dataset
    pairs.jsonl`."""
    return _with_score(sft(hf_assets_path, family), RewardDataLoader.Config())


def bradley_terry_images(
    hf_assets_path: str, family: ModuleType | None = None
) -> RewardTrainer.Config:
    """As `bradley_terry`, on pairs of answers to prompts with images. The class of transformers
    computes the model, of any family."""
    return _with_score(sft_images(hf_assets_path), ImageRewardDataLoader.Config())


def reward_lora(hf_assets_path: str, family: ModuleType | None = None) -> RewardTrainer.Config:
    """As `bradley_terry`, for low-rank adapters. The head has one row, so an adapter of rank 1 may
    become any head."""
    return _with_adapters(bradley_terry(hf_assets_path, family), LoRA.Config())


def reward_qlora(hf_assets_path: str, family: ModuleType | None = None) -> RewardTrainer.Config:
    """As `reward_lora`, with the base weights in few bits: as published, otherwise NF4."""
    return _with_adapters(bradley_terry(hf_assets_path, family), QLoRA.Config())


def reward_lora_images(
    hf_assets_path: str, family: ModuleType | None = None
) -> RewardTrainer.Config:
    """As `reward_lora`, on pairs of answers to prompts with images."""
    return _with_adapters(bradley_terry_images(hf_assets_path), LoRA.Config())


def _with_score(config: Trainer.Config, loader: RewardDataLoader.Config) -> RewardTrainer.Config:
    config.model_spec.model.scores = True
    return RewardTrainer.Config.based_on(config, dataloader=loader)


def _with_adapters(config: RewardTrainer.Config, adapters: LoRA.Config) -> RewardTrainer.Config:
    adapters.rank_pattern = ["head.output=1"]
    adapters.alpha_pattern = ["head.output=1"]
    adapters.include = [*adapters.include, r"^head\.output$"]
    return with_adapters(config, adapters)

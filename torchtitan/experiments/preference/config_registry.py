"""Configurations of preference optimization."""

import dataclasses
from types import ModuleType
from typing import TypeVar

from torchtitan.components.data import PromptDataLoader
from torchtitan.components.data.finetuning.preference import AnswerDataLoader, PreferenceDataLoader
from torchtitan.components.images.preference import (
    ImageAnswerDataLoader,
    ImagePreferenceDataLoader,
)
from torchtitan.components.losses.preference_losses import KTOLoss, PreferenceLoss
from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.models.auto.config_registry import sft, sft_images
from torchtitan.models.common.recipes import with_adapters
from torchtitan.models.llama3.config_registry import llama3_debugmodel_sft
from torchtitan.trainer.reference import ReferenceConfig

from .online import OnlinePreferenceTrainer
from .trainer import KTOTrainer, PreferenceTrainer

ConfigT = TypeVar("ConfigT", bound=PreferenceTrainer.Config)


def dpo(hf_assets_path: str, family: ModuleType | None = None) -> PreferenceTrainer.Config:
    """Direct preference optimization of the model in a Hugging Face folder: `--dataloader.dataset
    pairs.jsonl`."""
    return PreferenceTrainer.Config.based_on(
        sft(hf_assets_path, family),
        dataloader=PreferenceDataLoader.Config(dataset=[]),
        loss=PreferenceLoss.Config(),
        optimizer=Optimizer.Config(lr=5e-7, weight_decay=0.0),
    )


def dpo_lora(hf_assets_path: str, family: ModuleType | None = None) -> PreferenceTrainer.Config:
    """Direct preference optimization of low-rank adapters; the reference is the model without
    them."""
    return _with_adapters(dpo(hf_assets_path, family), LoRA.Config())


def dpo_qlora(hf_assets_path: str, family: ModuleType | None = None) -> PreferenceTrainer.Config:
    """As `dpo_lora`, with the base weights in few bits: as published, otherwise NF4."""
    return _with_adapters(dpo(hf_assets_path, family), QLoRA.Config())


def online_dpo(
    hf_assets_path: str, family: ModuleType | None = None
) -> OnlinePreferenceTrainer.Config:
    """As `dpo`, on the best and the worst of the model's own answers to each prompt:
    `--dataloader.dataset prompts.jsonl --rewards my_rewards.py:score`."""
    return OnlinePreferenceTrainer.Config.based_on(
        dpo(hf_assets_path, family),
        dataloader=PromptDataLoader.Config(dataset=[], too_long="error"),
    )


def online_dpo_lora(
    hf_assets_path: str, family: ModuleType | None = None
) -> OnlinePreferenceTrainer.Config:
    """As `online_dpo`, for low-rank adapters; the reference is the model without them."""
    return _with_adapters(online_dpo(hf_assets_path, family), LoRA.Config())


def dpo_images(hf_assets_path: str, family: ModuleType | None = None) -> PreferenceTrainer.Config:
    """As `dpo`, on pairs of answers to prompts with images. The class of transformers computes the
    model, of any family."""
    return PreferenceTrainer.Config.based_on(
        sft_images(hf_assets_path),
        dataloader=ImagePreferenceDataLoader.Config(dataset=[]),
        loss=PreferenceLoss.Config(),
        optimizer=Optimizer.Config(lr=5e-7, weight_decay=0.0),
    )


def dpo_lora_images(
    hf_assets_path: str, family: ModuleType | None = None
) -> PreferenceTrainer.Config:
    """As `dpo_lora`, on pairs of answers to prompts with images."""
    return _with_adapters(dpo_images(hf_assets_path), LoRA.Config())


def ipo(hf_assets_path: str, family: ModuleType | None = None) -> PreferenceTrainer.Config:
    """As `dpo`, with IPO's squared loss, which bounds the margin."""
    return dataclasses.replace(dpo(hf_assets_path, family), loss=PreferenceLoss.Config(kind="ipo"))


def simpo(hf_assets_path: str, family: ModuleType | None = None) -> PreferenceTrainer.Config:
    """As `dpo`, with SimPO's loss: no reference, rewards per token."""
    return dataclasses.replace(
        dpo(hf_assets_path, family), loss=PreferenceLoss.Config(kind="simpo", beta=2.0)
    )


def kto(hf_assets_path: str, family: ModuleType | None = None) -> KTOTrainer.Config:
    """Training on single answers with labels, or on pairs: `--dataloader.dataset answers.jsonl`."""
    loader = AnswerDataLoader.Config(dataset=[])
    return KTOTrainer.Config.based_on(
        dpo(hf_assets_path, family), dataloader=loader, loss=KTOLoss.Config()
    )


def kto_lora(hf_assets_path: str, family: ModuleType | None = None) -> KTOTrainer.Config:
    """As `kto`, for low-rank adapters; the reference is the model without them."""
    return _with_adapters(kto(hf_assets_path, family), LoRA.Config())


def kto_qlora(hf_assets_path: str, family: ModuleType | None = None) -> KTOTrainer.Config:
    """As `kto_lora`, with the base weights in few bits: as published, otherwise NF4."""
    return _with_adapters(kto(hf_assets_path, family), QLoRA.Config())


def kto_images(hf_assets_path: str, family: ModuleType | None = None) -> KTOTrainer.Config:
    """As `kto`, on answers to prompts with images."""
    return KTOTrainer.Config.based_on(
        dpo_images(hf_assets_path),
        dataloader=ImageAnswerDataLoader.Config(dataset=[]),
        loss=KTOLoss.Config(),
    )


def kto_lora_images(hf_assets_path: str, family: ModuleType | None = None) -> KTOTrainer.Config:
    """As `kto_lora`, on answers to prompts with images."""
    return _with_adapters(kto_images(hf_assets_path), LoRA.Config())


def dpo_debugmodel() -> PreferenceTrainer.Config:
    """Direct preference optimization of the small Llama 3 on built-in pairs: minutes on two CPU
    cores, no network. `--checkpoint.initial_load_path` starts from a checkpoint of llama3's
    `debugmodel_sft`."""
    config = llama3_debugmodel_sft()
    return PreferenceTrainer.Config.based_on(
        config,
        dataloader=PreferenceDataLoader.Config(dataset=["preferences"], chat_template="chatml"),
        loss=PreferenceLoss.Config(),
        optimizer=Optimizer.Config(lr=2e-4, weight_decay=0.0),
        training=dataclasses.replace(config.training, seq_len=256),
    )


def kto_debugmodel() -> KTOTrainer.Config:
    """As `dpo_debugmodel`, with KTO on the same answers."""
    loader = AnswerDataLoader.Config(dataset=["preferences"], chat_template="chatml")
    return KTOTrainer.Config.based_on(dpo_debugmodel(), dataloader=loader, loss=KTOLoss.Config())


def _with_adapters(config: ConfigT, adapters: LoRA.Config) -> ConfigT:
    adapted = with_adapters(config, adapters, lr=5e-6)
    return dataclasses.replace(adapted, reference=ReferenceConfig(kind="adapters_off"))

"""Configurations of distillation."""

import dataclasses
from types import ModuleType

from torchtitan.components.data import PromptDataLoader
from torchtitan.components.data.finetuning.answered_prompts import AnsweredPromptDataLoader
from torchtitan.components.losses.distillation import DistillationLoss
from torchtitan.components.peft import LoRA
from torchtitan.models.auto import config_registry as auto
from torchtitan.models.common.recipes import small_run, with_adapters
from torchtitan.models.llama3 import FLAVORS, model_spec

from .gkd import GKDTrainer
from .images import ImageDistillationTrainer
from .trainer import DistillationTrainer, OnPolicyTrainer


def distillation_debugmodel() -> DistillationTrainer.Config:
    """A small student on the built-in stories: `--teacher.path` is a checkpoint of `llama3`'s
    `debugmodel`."""
    student = dataclasses.replace(FLAVORS["debugmodel"], n_layers=2)
    config = small_run(model_spec(student, "debugmodel"), DistillationTrainer.Config)
    config.loss = DistillationLoss.Config()
    return config


def pretrain(hf_assets_path: str, family: ModuleType | None = None) -> DistillationTrainer.Config:
    """Distill on plain text into the model in a Hugging Face folder, as `auto`'s `pretrain`."""
    return DistillationTrainer.Config.based_on(
        auto.pretrain(hf_assets_path, family), loss=DistillationLoss.Config()
    )


def scratch(hf_assets_path: str, family: ModuleType | None = None) -> DistillationTrainer.Config:
    """Distill on plain text into the model that config.json describes, from random weights, as
    `auto`'s `scratch`."""
    return DistillationTrainer.Config.based_on(
        auto.scratch(hf_assets_path, family), loss=DistillationLoss.Config()
    )


def sft(hf_assets_path: str, family: ModuleType | None = None) -> DistillationTrainer.Config:
    """Distill on conversations or instructions, as `auto`'s `sft`."""
    return DistillationTrainer.Config.based_on(
        auto.sft(hf_assets_path, family), loss=DistillationLoss.Config()
    )


def sft_lora(hf_assets_path: str, family: ModuleType | None = None) -> DistillationTrainer.Config:
    """As `sft`, for low-rank adapters of the student."""
    return with_adapters(sft(hf_assets_path, family), LoRA.Config())


def sft_images(
    hf_assets_path: str, family: ModuleType | None = None
) -> ImageDistillationTrainer.Config:
    """Distill on conversations with images, as `auto`'s `sft_images`. The teacher has the same
    processor of images."""
    return ImageDistillationTrainer.Config.based_on(
        auto.sft_images(hf_assets_path), loss=DistillationLoss.Config()
    )


def on_policy(hf_assets_path: str, family: ModuleType | None = None) -> OnPolicyTrainer.Config:
    """Distill on the student's own answers to prompts: `--dataloader.dataset prompts.jsonl`."""
    loss = DistillationLoss.Config(kind="reverse_kl")
    loader = PromptDataLoader.Config(dataset=[], too_long="error")
    return OnPolicyTrainer.Config.based_on(
        auto.sft(hf_assets_path, family), loss=loss, dataloader=loader
    )


def on_policy_lora(hf_assets_path: str, family: ModuleType | None = None) -> OnPolicyTrainer.Config:
    """As `on_policy`, for low-rank adapters of the student."""
    return with_adapters(on_policy(hf_assets_path, family), LoRA.Config())


def gkd(hf_assets_path: str, family: ModuleType | None = None) -> GKDTrainer.Config:
    """Generalized knowledge distillation on the student's own answers and the answers in the data:
    `--dataloader.dataset my.jsonl`."""
    loss = DistillationLoss.Config(kind="jensen_shannon")
    loader = AnsweredPromptDataLoader.Config(dataset=[], too_long="error")
    return GKDTrainer.Config.based_on(
        auto.sft(hf_assets_path, family), loss=loss, dataloader=loader
    )


def gkd_lora(hf_assets_path: str, family: ModuleType | None = None) -> GKDTrainer.Config:
    """As `gkd`, for low-rank adapters of the student."""
    return with_adapters(gkd(hf_assets_path, family), LoRA.Config())

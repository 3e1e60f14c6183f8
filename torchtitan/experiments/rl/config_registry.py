"""Configurations of reinforcement learning."""

import dataclasses
from types import ModuleType

from torchtitan.components.data.finetuning import prompts
from torchtitan.components.data.plan import SuccessSampler
from torchtitan.components.images.prompts import ImagePromptDataLoader
from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.components.rollout.rollout import RolloutConfig
from torchtitan.models.auto.config_registry import sft, sft_images
from torchtitan.models.common.recipes import with_adapters
from torchtitan.models.llama3.config_registry import llama3_debugmodel_sft
from torchtitan.trainer import Trainer
from torchtitan.trainer.reference import ReferenceConfig

from .trainer import RLTrainer


def grpo(hf_assets_path: str, family: ModuleType | None = None) -> RLTrainer.Config:
    """Group relative policy optimization of the model in a Hugging Face folder, or another
    `--policy.method`: `--dataloader.dataset prompts.jsonl --rewards my_rewards.py:score`."""
    loader = prompts.PromptDataLoader.Config(dataset=[], too_long="error")
    return _grpo(sft(hf_assets_path, family), loader)


def grpo_curriculum(hf_assets_path: str, family: ModuleType | None = None) -> RLTrainer.Config:
    """As `grpo`; prompts that are answered correctly about half of the time are drawn more
    often."""
    config = grpo(hf_assets_path, family)
    loader = dataclasses.replace(config.dataloader, sampler=SuccessSampler.Config())  # type: ignore
    return dataclasses.replace(config, dataloader=loader)


def grpo_lora(hf_assets_path: str, family: ModuleType | None = None) -> RLTrainer.Config:
    """As `grpo`, for low-rank adapters; a reference (`--policy.beta`) is the model without them."""
    return _with_adapters(grpo(hf_assets_path, family), LoRA.Config())


def grpo_qlora(hf_assets_path: str, family: ModuleType | None = None) -> RLTrainer.Config:
    """As `grpo_lora`, with the base weights in few bits: as published, otherwise NF4."""
    return _with_adapters(grpo(hf_assets_path, family), QLoRA.Config())


def grpo_images(hf_assets_path: str, family: ModuleType | None = None) -> RLTrainer.Config:
    """As `grpo`, for prompts with images and a model that `auto`'s `sft_images` computes."""
    loader = ImagePromptDataLoader.Config(dataset=[], too_long="error")
    return _grpo(sft_images(hf_assets_path), loader)


def grpo_lora_images(hf_assets_path: str, family: ModuleType | None = None) -> RLTrainer.Config:
    """As `grpo_lora`, for prompts with images."""
    return _with_adapters(grpo_images(hf_assets_path), LoRA.Config())


def _with_adapters(config: RLTrainer.Config, adapters: LoRA.Config) -> RLTrainer.Config:
    adapted = with_adapters(config, adapters, lr=1e-5)
    return dataclasses.replace(adapted, reference=ReferenceConfig(kind="adapters_off"))


def _grpo(config: Trainer.Config, loader: prompts.PromptDataLoader.Config) -> RLTrainer.Config:
    training = dataclasses.replace(config.training, local_batch_size=8)
    optimizer = Optimizer.Config(lr=1e-6, weight_decay=0.0)
    return RLTrainer.Config.based_on(
        config, dataloader=loader, training=training, optimizer=optimizer
    )


def rl_debugmodel() -> RLTrainer.Config:
    """Reward the small Llama 3, with random weights, for 50 characters in reply to the built-in
    chats. Its first answers have 55 to 90, so that rewards differ from the first step on."""
    config, first_message = llama3_debugmodel_sft(), f"{prompts.__name__}:first_message"
    return RLTrainer.Config.based_on(
        config,
        dataloader=prompts.PromptDataLoader.Config(
            dataset=["chats"], format=first_message, chat_template="chatml"
        ),
        rollout=RolloutConfig(group_size=4, max_new_tokens=16),
        rewards=["length=50"],
        training=dataclasses.replace(config.training, steps=20),
    )

"""Configurations of reinforcement learning."""

import dataclasses
from types import ModuleType

from torchtitan.components.data.finetuning import prompts
from torchtitan.components.optimizer import Optimizer
from torchtitan.components.rollout.rollout import Rollouts
from torchtitan.models.auto.config_registry import sft
from torchtitan.models.llama3.config_registry import llama3_debugmodel_sft
from torchtitan.trainer import Trainer

from .trainer import RLTrainer


def grpo(hf_assets_path: str, family: ModuleType | None = None) -> RLTrainer.Config:
    """Group relative policy optimization of the model in a Hugging Face folder, or another `--policy.method`:
    `--dataloader.dataset prompts.jsonl --rewards my_rewards.py:score`."""
    config = sft(hf_assets_path, family)
    training = dataclasses.replace(config.training, local_batch_size=8)
    optimizer = Optimizer.Config(lr=1e-6, weight_decay=0.0)
    return with_rollouts(dataclasses.replace(config, training=training, optimizer=optimizer))


def rl_debugmodel() -> RLTrainer.Config:
    """Train the small Llama 3, from random weights, to write 20 characters in reply to the built-in conversations."""
    config = with_rollouts(llama3_debugmodel_sft())
    config.dataloader = prompts.PromptDataLoader.Config(dataset=["chats"], format=f"{prompts.__name__}:first_message")
    config.rollout = Rollouts.Config(group_size=4, max_new_tokens=16)
    config.rewards = ["length=20"]
    config.training = dataclasses.replace(config.training, steps=20)
    return config


def with_rollouts(config: Trainer.Config) -> RLTrainer.Config:
    """Return `config` for rollouts from user-supplied prompts."""
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return RLTrainer.Config(**{**sections, "dataloader": prompts.PromptDataLoader.Config(dataset=[], too_long="error")})

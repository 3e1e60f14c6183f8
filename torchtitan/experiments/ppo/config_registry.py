"""Configurations of proximal policy optimization."""

from types import ModuleType

from torchtitan.components.losses.policy_loss import PolicyLoss
from torchtitan.components.optim.optimizer import ParamGroup
from torchtitan.experiments.rl import config_registry as rl

from .trainer import PPOTrainer


def ppo(hf_assets_path: str, family: ModuleType | None = None) -> PPOTrainer.Config:
    """As `rl`'s `grpo`, with a critic: `--dataloader.dataset prompts.jsonl --rewards
    my_rewards.py:score`."""
    return _with_critic(rl.grpo(hf_assets_path, family), lr=1e-4)


def ppo_lora(hf_assets_path: str, family: ModuleType | None = None) -> PPOTrainer.Config:
    """As `rl`'s `grpo_lora`, with a critic, all of whose weights are trained."""
    return _with_critic(rl.grpo_lora(hf_assets_path, family), lr=1e-4)


def ppo_images(hf_assets_path: str, family: ModuleType | None = None) -> PPOTrainer.Config:
    """As `rl`'s `grpo_images`, with a critic."""
    return _with_critic(rl.grpo_images(hf_assets_path), lr=1e-4)


def ppo_debugmodel() -> PPOTrainer.Config:
    """As `rl_debugmodel`, with a critic."""
    return _with_critic(rl.rl_debugmodel(), lr=1e-2)


def _with_critic(config: rl.RLTrainer.Config, lr: float) -> PPOTrainer.Config:
    # Adam moves each weight of the head by its learning rate, and the head begins at 0.
    config.optimizer.param_groups["value"] = ParamGroup(
        pattern=r"^value\.", lr=lr, weight_decay=0.0
    )
    return PPOTrainer.Config.based_on(config, policy=PolicyLoss.Config(method="ppo"))

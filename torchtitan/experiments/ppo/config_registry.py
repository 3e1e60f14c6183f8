"""Configurations of proximal policy optimization."""

from types import ModuleType

from torchtitan.components.optimizer import ParamGroup
from torchtitan.components.policy_loss import PolicyLoss
from torchtitan.experiments.rl.config_registry import grpo

from .trainer import PPOTrainer


def ppo(hf_assets_path: str, family: ModuleType | None = None) -> PPOTrainer.Config:
    """As `rl`'s `grpo`, with a critic: `--dataloader.dataset prompts.jsonl --rewards my_rewards.py:score`."""
    config = PPOTrainer.Config.based_on(grpo(hf_assets_path, family), policy=PolicyLoss.Config(method="ppo"))
    # Adam moves each weight of the head by its learning rate, and the head begins at 0.
    config.optimizer.param_groups["value"] = ParamGroup(pattern=r"^value\.", lr=1e-4, weight_decay=0.0)
    return config

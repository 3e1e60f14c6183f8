"""Rollouts (`rollout`), environments and rewards (`rewards`), for training methods in which the
model samples."""

from torchtitan.components.rollout.chat import Reply
from torchtitan.components.rollout.environment import Environment, Step
from torchtitan.components.rollout.trajectory import Trajectory

__all__ = ["Environment", "Reply", "Step", "Trajectory"]

"""`RatedRolloutTrainer`: a trainer that samples answers with its own weights and rates them by the
reward functions of the configuration."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torchtitan.components.data.base import Batch
from torchtitan.components.rollout.rewards import RewardName, Rewards
from torchtitan.components.rollout.rollout import RolloutConfig
from torchtitan.components.rollout.trajectory import Group
from torchtitan.experiments.reward.trainer import batch_reward_function, check_reward_model
from torchtitan.tools.errors import UserError
from torchtitan.trainer.reference import ReferenceTrainer
from torchtitan.trainer.rollouts import RolloutTrainer, check_rollouts

MOST_BATCHES = 10
"""Global batches that may be sampled for a step."""

EQUAL_REWARDS = f"the rewards of each prompt's answers were equal in {MOST_BATCHES} global batches"


class RatedRolloutTrainer(ReferenceTrainer, RolloutTrainer):
    """A trainer whose configuration has the sections and options `rollout`, `rewards` and
    `reward_weights`. A subclass may also derive from another trainer with a reference model whose
    `Config` adds no fields, and its `Config` from both configs, this one first."""

    @dataclass(kw_only=True, slots=True)
    class Config(ReferenceTrainer.Config):
        """A whole run on answers that are sampled and rated."""

        rollout: RolloutConfig = field(default_factory=RolloutConfig)
        """Sampling of trajectories."""

        rewards: list[RewardName] = field(default_factory=list)
        """Rewards: number, math, pattern=REGEX, length=N, reward_model=DIR, package.module:function
        or file.py:function."""

        reward_weights: list[float] = field(default_factory=list)
        """Weight of each reward function; empty: 1."""

        def check_rated_rollouts(self) -> None:
            """Raise `UserError` for a run that cannot sample or rate."""
            check_rollouts(self)
            if self.reference.kind == "cached":
                raise UserError(
                    "--reference.kind cached holds no answers that are sampled later; use model"
                )
            if not (self.rewards or self.rollout.function):
                raise UserError("--rewards is empty; name a function, such as my_rewards.py:score")
            Rewards(self.rewards, self.reward_weights, check_reward_model)

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.rewards = Rewards(config.rewards, config.reward_weights, batch_reward_function)

    def sampled_batches(self, batches: Iterator[Batch]) -> Iterator[list[Group]]:
        """Yield the groups of this rank's prompts in each of the next `MOST_BATCHES` global
        batches. A caller takes as many as its step needs."""
        self.watchdog.phase("rollouts")
        for number in range(MOST_BATCHES):
            yield self.next_groups(batches, number)

"""`RatedRolloutTrainer`: a trainer that samples answers with its own weights and rates them by the
reward functions of the configuration."""

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from torchtitan.components.data import PromptDataLoader
from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.prompt_streams import PromptStreamDataLoader
from torchtitan.components.data.plan.sampler import Array, StepStatistics
from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.prompts import ImagePromptDataLoader
from torchtitan.components.rollout.reward_trial import try_rewards
from torchtitan.components.rollout.rewards import RewardName, Rewards
from torchtitan.components.rollout.rollout import RolloutConfig
from torchtitan.components.rollout.trajectory import Group
from torchtitan.experiments.reward.rating import RewardModel, check_reward_model
from torchtitan.tools.errors import UserError
from torchtitan.trainer.models import RunModel
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
            check = partial(check_reward_model, with_images=self.prompts_have_images)
            Rewards(self.rewards, self.reward_weights, check)

        @property
        def prompts_have_images(self) -> bool:
            return isinstance(self.dataloader, ImagePromptDataLoader.Config)

    config: Config
    rates_samples = True

    def __init__(self, config: Config):
        super().__init__(config)
        rate = partial(RewardModel, with_images=config.prompts_have_images)
        self.rewards = Rewards(config.rewards, config.reward_weights, rate)
        self._rated: list[tuple[int, float]] = []  # prompts of a step with their rewards

    def build_models(self) -> dict[str, RunModel]:
        """Call each reward function once, then build the models."""
        self.ranks.broadcast_from_rank0(self.try_rewards)
        return super().build_models()

    def try_rewards(self) -> None:
        """Call each reward function, except reward models, with the first row of the data, so that
        a mistake in one ends the run before the models are built."""
        loader, config = self.dataloader, self.config
        if not isinstance(loader, PromptDataLoader | PromptStreamDataLoader) or not config.rewards:
            return
        if found := loader.first_prompt():
            where, encoded = found
            _, row = json.loads(encoded.answer or "")
            prompt = self.tokenizer.decode(encoded.ids.tolist(), skip_special_tokens=True)
            images = [ImageFile.from_json(image) for image in encoded.images]
            size = config.rollout.group_size
            try_rewards(config.rewards, where, prompt, row, images, group_size=size)

    def sampled_batches(self, batches: Iterator[Batch]) -> Iterator[list[Group]]:
        """Yield the groups of this rank's prompts in each of the next `MOST_BATCHES` global
        batches. A caller takes as many as its step needs."""
        self.watchdog.phase("rollouts")
        self._rated = []
        for number in range(MOST_BATCHES):
            groups = self.next_groups(batches, number)
            if self.parallel_dims.is_batch_leader:
                self._rated += [
                    (t.document, t.total) for t in itertools.chain(*groups) if t.total is not None
                ]
            yield groups

    def step_statistics(self, step: int, **numbers: float) -> StepStatistics:
        statistics = super().step_statistics(step, **numbers)
        if not self.dataloader.needs_sample_rewards:
            return statistics
        samples, rewards = mean_rewards(itertools.chain(*self.ranks.gather(self._rated)))
        return replace(statistics, samples=samples, sample_rewards=rewards)


def mean_rewards(
    rated: Iterable[tuple[int, float]],
) -> tuple[Array, npt.NDArray[np.float64]]:
    """Return the numbers of prompts, in order, and the mean reward of each prompt. The means do not
    depend on the order of `rated`, which the layout changes."""
    every = sorted(rated)
    numbers, places, counts = np.unique(
        np.array([number for number, _ in every], np.int64), return_inverse=True, return_counts=True
    )
    sums = np.bincount(places, [reward for _, reward in every], len(numbers))
    return numbers, sums / counts

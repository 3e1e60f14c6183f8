"""The trainer of preference optimization on the model's own answers (`CONFIG=online_dpo`)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from torchtitan.components.data import PromptDataLoader
from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.chat_encoding import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.preference import (
    SEQUENCES_PER_SAMPLE,
    PreferenceDataLoader,
)
from torchtitan.components.data.plan.packing import first_fit_decreasing
from torchtitan.components.images.prompts import ImagePromptDataLoader
from torchtitan.components.losses.preference_losses import PreferenceLoss
from torchtitan.components.rollout.rewards import RewardName, Rewards
from torchtitan.components.rollout.rollout import RolloutConfig
from torchtitan.components.rollout.trajectory import Group, Trajectory
from torchtitan.distributed.process_group import on_all_ranks
from torchtitan.experiments.reward.trainer import batch_reward_function, check_reward_model
from torchtitan.tools.errors import SharedError, UserError, require
from torchtitan.trainer.rollouts import RolloutTrainer, check_rollouts

from .trainer import PreferenceTrainer

AnswerPair = tuple[Trajectory, Trajectory]

MOST_BATCHES = 10
"""Global batches that may be sampled for a step."""


class OnlinePreferenceTrainer(PreferenceTrainer, RolloutTrainer):
    """Train on pairs of the model's own answers: the one with the highest and the one with the
    lowest reward of those to a prompt (Online DPO, Guo et al., arXiv:2402.04792). Prompts whose
    answers have equal rewards give no pair, and are counted."""

    @dataclass(kw_only=True, slots=True)
    class Config(PreferenceTrainer.Config):
        """A whole run of preference optimization on the model's own answers."""

        rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(group_size=2))
        """Sampling of answers."""

        rewards: list[RewardName] = field(default_factory=list)
        """Rewards that compare answers, as of --module rl."""

        reward_weights: list[float] = field(default_factory=list)
        """Weight of each reward function; empty: 1."""

        def validate(self) -> None:
            PreferenceTrainer.Config.validate(self)
            check_rollouts(self)
            if not isinstance(self.chosen_loss, PreferenceLoss.Config):
                raise UserError("--config online_dpo compares pairs, and takes no loss of answers")
            if self.reference.kind == "cached":
                raise UserError(
                    "--reference.kind cached holds no answers that are sampled later; use model"
                )
            if isinstance(self.dataloader, ImagePromptDataLoader.Config):
                raise UserError("--config online_dpo packs answers to prompts without images only")
            why = "whose loss does not correct for the weights that sampled an answer"
            self.rollout.require_current("--config online_dpo", why)
            size = self.rollout.group_size
            require(size >= 2, "--rollout.group_size", size, "2 or more")
            if not (self.rewards or self.rollout.function):
                raise UserError("--rewards is empty; name a function, such as my_rewards.py:score")
            Rewards(self.rewards, self.reward_weights, check_reward_model)

    config: Config
    dataloader: PromptDataLoader
    measures_named = (
        *PreferenceTrainer.measures_named,
        *RolloutTrainer.trajectory_measures,
        "pairs",
    )

    def __init__(self, config: Config):
        super().__init__(config)
        self.rewards = Rewards(config.rewards, config.reward_weights, batch_reward_function)

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        """Sample answers to the next prompts, and return their pairs in packed windows, equally
        many on each rank. Raise `UserError` if ten global batches have no pair."""
        load = super().next_micro_batches
        groups: list[Group] = []
        self.watchdog.phase("rollouts")
        for number in range(MOST_BATCHES):
            sampled = self.sample(lambda: load(batches), f"{self.step + 1}/{number}")
            groups += sampled
            pairs = pairs_of(groups)
            if not on_all_ranks(not pairs) or on_all_ranks(not sampled):
                break
        else:
            raise SharedError(
                f"the rewards of each prompt's answers were equal in {MOST_BATCHES} global "
                "batches, which leaves no pair; use a reward that differs, or a larger "
                "--rollout.group_size"
            )
        if n_tokens := self.measure_pairs(groups, pairs):
            self.tokens_per_step = n_tokens
        self.write_completions(groups)
        return self.packed_pairs(pairs)

    def validation_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sums over the pairs of answers to held-out prompts."""
        groups = self.sample(lambda: [batch], "validation")
        pairs = pairs_of(groups)
        self.measure_pairs(groups, pairs)
        zero = self.local_addend(torch.zeros((), device=self.device))
        sums = [(zero, zero), *map(super().validation_sums, self.packed_pairs(pairs))]
        losses, weights = zip(*sums, strict=True)
        return torch.stack(losses).sum(), torch.stack(weights).sum()

    def measure_pairs(self, groups: list[Group], pairs: list[AnswerPair]) -> int:
        """Measure the trajectories and the share of prompts with a pair; return the number of
        tokens."""
        own = self.parallel_dims.is_batch_leader
        counts = self.ranks.gather((len(pairs), len(groups)) if own else (0, 0))
        n_pairs, n_groups = map(sum, zip(*counts, strict=True))
        self.measure("pairs", torch.tensor(n_pairs), torch.tensor(n_groups))
        return self.measure_trajectories(groups)

    def packed_pairs(self, pairs: list[AnswerPair]) -> list[Batch]:
        """Return batches as of `PreferenceDataLoader` on the device, equally many on each rank."""
        training = self.config.training
        rows = [EncodedRow(tuple(map(_sample_of, pair))) for pair in pairs]
        lengths = np.array([sum(len(t.tokens) - 1 for t in pair) for pair in pairs], np.int64)
        windows = first_fit_decreasing(lengths, training.seq_len * SEQUENCES_PER_SAMPLE)
        size = training.local_batch_size
        n_windows = size * max(self.ranks.gather(-(-len(windows) // size)))
        packed = [[rows[number] for number in window] for window in windows]
        packed += [[] for _ in range(n_windows - len(packed))]
        batches = [
            PreferenceDataLoader.collate(packed[start : start + size], training.seq_len)
            for start in range(0, n_windows, size)
        ]
        return [self.post_dataloading_process(batch) for batch in batches]


def pairs_of(groups: Iterable[Group]) -> list[AnswerPair]:
    """Return the best and the worst trajectory of each group, the first of equal ones, for groups
    with several rewards. Trajectories without a verdict are left out."""
    pairs = []
    for group in groups:
        judged = [(t.total, t) for t in group if t.total is not None]
        if not judged:
            continue
        best, worst = (choose(judged, key=lambda pair: pair[0]) for choose in (max, min))
        if best[0] > worst[0]:
            pairs.append((best[1], worst[1]))
    return pairs


def _sample_of(trajectory: Trajectory) -> EncodedSample:
    return EncodedSample(np.array(trajectory.tokens), np.array(trajectory.loss_mask))

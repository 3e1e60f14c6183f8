"""The trainer of preference optimization on the model's own answers (`CONFIG=online_dpo`)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from torchtitan.components.data import PromptDataLoader
from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.encoded import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.preference import (
    SEQUENCES_PER_SAMPLE,
    PreferenceDataLoader,
)
from torchtitan.components.data.plan.packing import first_fit_decreasing
from torchtitan.components.images.prompts import ImagePromptDataLoader
from torchtitan.components.losses.preference_losses import PreferenceLoss
from torchtitan.components.rollout.batches import equal_batches
from torchtitan.components.rollout.rollout import RolloutConfig
from torchtitan.components.rollout.trajectory import Group, Trajectory
from torchtitan.distributed.process_group import on_all_ranks
from torchtitan.experiments.reward.rated_rollouts import EQUAL_REWARDS, RatedRolloutTrainer
from torchtitan.tools.errors import SharedError, UserError, require

from .trainer import PreferenceTrainer

AnswerPair = tuple[Trajectory, Trajectory]


class OnlinePreferenceTrainer(PreferenceTrainer, RatedRolloutTrainer):
    """Train on pairs of the model's own answers: the one with the highest and the one with the
    lowest reward of those to a prompt (Online DPO, Guo et al., arXiv:2402.04792). Prompts whose
    answers have equal rewards give no pair, and are counted."""

    @dataclass(kw_only=True, slots=True)
    class Config(RatedRolloutTrainer.Config, PreferenceTrainer.Config):
        """A whole run of preference optimization on the model's own answers."""

        rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(group_size=2))
        """Sampling of answers."""

        def validate(self) -> None:
            PreferenceTrainer.Config.validate(self)
            if not isinstance(self.chosen_loss, PreferenceLoss.Config):
                raise UserError("--config online_dpo compares pairs, and takes no loss of answers")
            if isinstance(self.dataloader, ImagePromptDataLoader.Config):
                raise UserError("--config online_dpo packs answers to prompts without images only")
            why = "whose loss does not correct for the weights that sampled an answer"
            self.rollout.require_current("--config online_dpo", why)
            size = self.rollout.group_size
            require(size >= 2, "--rollout.group_size", size, "2 or more")
            self.check_rated_rollouts()

    config: Config
    dataloader: PromptDataLoader
    measures_named = (
        *PreferenceTrainer.measures_named,
        *RatedRolloutTrainer.trajectory_measures,
        "pairs",
    )

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        """Sample answers to the next prompts, and return their pairs in packed windows, equally
        many on each rank. Raise `UserError` if ten global batches have no pair."""
        groups: list[Group] = []
        for sampled in self.sampled_batches(batches):
            groups += sampled
            pairs = pairs_of(groups)
            if not on_all_ranks(not pairs) or on_all_ranks(not sampled):
                break
        else:
            raise SharedError(
                f"{EQUAL_REWARDS}, which leaves no pair; use a reward that differs, or a larger "
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
        packed = [[rows[number] for number in window] for window in windows]
        return [
            self.post_dataloading_process(PreferenceDataLoader.collate(part, training.seq_len))
            for part in equal_batches(packed, training.local_batch_size, self.ranks)
        ]


def pairs_of(groups: Iterable[Group]) -> list[AnswerPair]:
    """Return the best and the worst trajectory of each group, the first of equal ones, for groups
    with several rewards. Trajectories without a verdict are skipped."""
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

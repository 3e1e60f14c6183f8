"""The trainer of on-policy distillation."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchtitan.components.data import PromptDataLoader
from torchtitan.components.data.base import Batch
from torchtitan.components.rollout.rewards import Rewards
from torchtitan.components.rollout.rollout import Rollouts, to_batches
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer
from torchtitan.trainer.rollouts import build_rollouts, check_rollouts

from .trainer import DistillationTrainer


class OnPolicyTrainer(DistillationTrainer):
    """Let the student answer prompts and learn the teacher's distributions at the tokens of its answers, which count as
    given (Agarwal et al., arXiv:2306.13649, with lambda = 1)."""

    @dataclass(kw_only=True, slots=True)
    class Config(DistillationTrainer.Config):
        """A whole run of on-policy distillation."""

        rollout: Rollouts.Config = field(default_factory=lambda: Rollouts.Config(group_size=1))
        """Sampling of answers."""

        def validate(self) -> None:
            DistillationTrainer.Config.validate(self)
            check_rollouts(self)
            if self.teacher.cache:
                raise UserError("--teacher.cache has no scores of new answers; leave it out")

    config: Config
    dataloader: PromptDataLoader

    def __init__(self, config: Trainer.Config):
        super().__init__(config)
        self.rollouts = build_rollouts(self, Rewards([], []))

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        prompts = super().next_micro_batches(batches)
        answers = self.answers(prompts, str(self.step + 1), self.dataloader.sample_name)
        self.tokens_per_step = sum(batch["input"].numel() for batch in answers) * self.parallel_dims.dp_degree
        return answers

    def answers(self, prompts: list[Batch], *names: Any, **options: Any) -> list[Batch]:
        """Return answers to prompts, packed, in equally many batches on each rank."""
        with self.mixed_precision():
            groups = self.rollouts.run(lambda: prompts, *names, **options)
        training, trajectories = self.config.training, itertools.chain(*groups)
        return to_batches(
            [(answer, 0.0) for answer in trajectories], training.seq_len, training.local_batch_size, self.ranks
        )

    def validation_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sums over one answer to each held-out prompt."""
        answers = self.answers([batch], "validation", "validation prompt {}".format, size=1)
        losses, weights = zip(*map(super().validation_sums, answers), strict=True)
        return sum(losses[1:], losses[0]), sum(weights[1:], weights[0])

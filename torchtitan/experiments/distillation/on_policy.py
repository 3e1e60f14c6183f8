"""The trainer of on-policy distillation."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.rollout.rollout import RolloutConfig
from torchtitan.tools.errors import UserError
from torchtitan.trainer.rollouts import RolloutTrainer, check_rollouts

from .trainer import DistillationTrainer


class OnPolicyTrainer(DistillationTrainer, RolloutTrainer):
    """Let the student answer prompts and learn the teacher's distributions at the tokens of its answers, which count as
    given (Agarwal et al., arXiv:2306.13649, with lambda = 1)."""

    @dataclass(kw_only=True, slots=True)
    class Config(DistillationTrainer.Config):
        """A whole run of on-policy distillation."""

        rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(group_size=1))
        """Sampling of answers."""

        def validate(self) -> None:
            DistillationTrainer.Config.validate(self)
            check_rollouts(self)
            if self.teacher.cache:
                raise UserError("--teacher.cache has no scores of new answers; leave it out")

    config: Config

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        prompts = super().next_micro_batches(batches)
        self.watchdog.phase("rollouts")
        answers = self.packed(self.sample(lambda: prompts, str(self.step + 1)))
        self.tokens_per_step = sum(batch["input"].numel() for batch in answers) * self.parallel_dims.dp_degree
        return answers

    def validation_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sums over one answer to each held-out prompt."""
        answers = self.packed(self.sample(lambda: [batch], "validation", size=1))
        losses, weights = zip(*map(super().validation_sums, answers), strict=True)
        return torch.stack(losses).sum(), torch.stack(weights).sum()

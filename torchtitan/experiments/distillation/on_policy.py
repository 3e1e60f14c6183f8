"""The trainer of on-policy distillation."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchtitan.components.data import PromptDataLoader
from torchtitan.components.data.base import Batch, to_batch
from torchtitan.components.rollout.rewards import Rewards
from torchtitan.components.rollout.rollout import Rollouts, pack_trajectories, padding
from torchtitan.distributed.process_group import gather_objects
from torchtitan.experiments.rl.trainer import RLTrainer
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

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
            self.rollout.validate()
            self.parallelism.require_one("context", user="rollouts, which the run's own weights generate")
            if self.teacher.cache:
                raise UserError("--teacher.cache has no scores of new answers; leave it out")

    config: Config
    dataloader: PromptDataLoader
    build_engine: Any = RLTrainer.build_engine

    def __init__(self, config: Trainer.Config):
        super().__init__(config)
        parts = {"tokenizer": self.tokenizer, "rewards": Rewards([], []), "seed": self.config.debug.seed}
        self.rollouts = self.config.rollout.build(engine=self.build_engine(), **parts)

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        prompts, size = super().next_micro_batches(batches), self.config.rollout.group_size
        return self.sample(prompts, str(self.step + 1), size, self.dataloader.sample_name)

    def sample(self, prompts: list[Batch], phase: str, size: int, name_of: Callable[[int], str]) -> list[Batch]:
        """Return `size` answers to each prompt in packed windows, equally many on each rank."""
        with self.mixed_precision():
            trajectories = itertools.chain(*self.rollouts.run(prompts, phase, size, name_of))
        seq_len, n_rows = self.config.training.seq_len, self.config.training.local_batch_size
        windows = pack_trajectories([(trajectory, 0.0) for trajectory in trajectories], seq_len)
        n_batches = max(gather_objects(-(-len(windows) // n_rows)))
        self.tokens_per_step = n_batches * n_rows * self.parallel_dims.dp_degree * seq_len
        windows += [padding(seq_len)] * (n_batches * n_rows - len(windows))
        return [to_batch(windows[start : start + n_rows]) for start in range(0, len(windows), n_rows)]

    def validation_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sums over one answer to each held-out prompt."""
        answers = self.sample([batch], "validation", 1, "validation prompt {}".format)
        losses, weights = zip(*(DistillationTrainer.validation_sums(self, answer) for answer in answers), strict=True)
        return sum(losses[1:], losses[0]), sum(weights[1:], weights[0])

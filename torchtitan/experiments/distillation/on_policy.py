"""The trainer of on-policy distillation."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from torchtitan.components.data import PromptDataLoader
from torchtitan.components.data.base import Batch
from torchtitan.components.rollout.rewards import Rewards
from torchtitan.components.rollout.rollout import Rollouts, to_batches
from torchtitan.distributed.process_group import gather_objects
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

    def __init__(self, config: Trainer.Config):
        super().__init__(config)
        assert self.dataloader.template
        self.rollouts = self.config.rollout.build(
            model=self.model_parts[0],
            tokenizer=self.tokenizer,
            template=self.dataloader.template,
            rewards=Rewards([], []),
            context=self.config.training.seq_len + 1,
            seed=self.config.debug.seed,
            leader=self.rank - self.parallel_dims.coordinate("tp"),
        )

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        return self.answers(super().next_micro_batches(batches), str(self.step + 1), self.dataloader.sample_name)

    def answers(
        self, prompts: list[Batch], phase: str, name_of: Callable[[int], str], size: int | None = None
    ) -> list[Batch]:
        """Return answers to the prompts in batches, as many as `Rollouts.run`, equally many batches on each rank."""
        with self.mixed_precision():
            answers = list(itertools.chain(*self.rollouts.run(prompts, phase, name_of, size)))
        n_tokens = sum(len(answer.tokens) for answer in answers) if self.parallel_dims.is_batch_leader else 0
        self.tokens_per_step = sum(gather_objects(n_tokens))
        training = self.config.training
        return to_batches([(answer, 0.0) for answer in answers], training.seq_len, training.local_batch_size)

    def validation_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sums over one answer to each held-out prompt."""
        answers = self.answers([batch], "validation", "validation prompt {}".format, 1)
        losses, weights = zip(*(DistillationTrainer.validation_sums(self, answer) for answer in answers), strict=True)
        return sum(losses[1:], losses[0]), sum(weights[1:], weights[0])

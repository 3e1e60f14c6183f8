"""The trainers of distillation: `DistillationTrainer`, with a frozen teacher that runs with the
student or is read from a cache, and `OnPolicyTrainer` for the student's own answers
(`gkd.GKDTrainer`: mixed with the answers in the data)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.components.data.base import Batch, images_in
from torchtitan.components.data.sequence_cache import SequenceCache
from torchtitan.components.losses.distillation import (
    DistillationLoss,
    Outputs,
    TeacherConfig,
    TopTokens,
    check_same_tokens,
)
from torchtitan.components.losses.loss import IGNORE_INDEX
from torchtitan.components.rollout.rollout import RolloutConfig
from torchtitan.components.rollout.trajectory import Group
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.components.weights.assets import asset_folder
from torchtitan.models.pretrained import internal_source
from torchtitan.protocols import ModelSpec
from torchtitan.tools.errors import UserError, errors_of, require
from torchtitan.trainer.config import Preflight
from torchtitan.trainer.models import RunModel
from torchtitan.trainer.reference import FrozenModelTrainer, check_cache
from torchtitan.trainer.rollouts import RolloutTrainer, check_rollouts


class DistillationTrainer(FrozenModelTrainer):
    """Train a student to predict what `models["teacher"]` predicts, or what a cache holds of its
    predictions."""

    @dataclass(kw_only=True, slots=True)
    class Config(FrozenModelTrainer.Config):
        """A whole run of distillation."""

        teacher: TeacherConfig = field(default_factory=TeacherConfig)
        """Teacher."""

        def validate(self) -> None:
            if type(self.chosen_loss) is not DistillationLoss.Config:
                raise UserError(
                    "--module distillation has its own loss (--loss.kind), and takes no other"
                )
            self.parallelism.require_one("pipeline", user="--module distillation")

        def check(self, world_size: int, *, dry_run: bool = False) -> Preflight:
            preflight = FrozenModelTrainer.Config.check(self, world_size, dry_run=dry_run)
            teacher, tokenizer = self.teacher, preflight.tokenizer
            specs = self.resolved_spec(tokenizer), self.teacher_spec()
            if not dry_run:  # which has no tokenizer
                folder = asset_folder(Path(teacher.path))
                check_same_tokens(tokenizer, PretrainedTokenizer.Config().build(path=folder))
            size, taught = (int(spec.model.vocab_size or 0) for spec in specs)
            if size != taught:
                vocabularies = f"a student's vocabulary of {size} rows and a teacher's of {taught}"
                self.parallelism.require_one("tensor", user=vocabularies)
            if teacher.cache:
                check_cache(self, "--teacher.cache", dry_run=dry_run)
                valid = (
                    f"from 1 to the student's vocabulary, {size}, which the teacher's, {taught}, "
                    "must cover"
                )
                require(
                    0 < teacher.top_k <= size <= taught, "--teacher.top_k", teacher.top_k, valid
                )
            return preflight

        def teacher_spec(self) -> ModelSpec:
            """Return the teacher's specification. Raise `UserError` if its folder holds no whole
            model."""
            if not self.teacher.path:
                raise UserError(
                    "--teacher.path is not set; name the folder of the model to learn from"
                )
            with errors_of("--teacher.path"):
                return internal_source(self.teacher.path)[0]

    config: Config
    loss: DistillationLoss
    frozen = "teacher"
    measures_named: tuple[str, ...] = ("cross_entropy", "divergence")

    def build_models(self) -> dict[str, RunModel]:
        config, spec = self.config.teacher, self.config.teacher_spec()
        teacher = self.build_other_model(spec, weights=config.path, offloaded=config.offload)
        return {**super().build_models(), "teacher": teacher}

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch, and the number of its valid tokens."""
        inputs, images = (batch["input"], batch.get("attention")), images_in(batch)
        labels_BL = batch["labels"]
        has_grad = torch.is_grad_enabled()
        sums: list[Tensor] = []

        def learn_from(teacher: Outputs | TopTokens) -> Tensor:
            def learn(*own: Any, **changes: Any) -> tuple[Tensor, ...]:
                return self.loss(Outputs(*own, **changes), teacher, labels_BL)

            with torch.set_grad_enabled(has_grad):
                sums.extend(self.models["model"](*inputs, head=learn, **images))
            return sums[0].detach()

        if self.cache:
            learn_from(TopTokens(batch["ids"], batch["log_probs"]))
        # FSDP gathers output weights only while a head runs, so the student runs within the
        # teacher's
        else:
            self.models["teacher"](
                *inputs,
                head=lambda *outputs, **changes: learn_from(Outputs(*outputs, **changes)),
                **images,
            )
        n_tokens = (labels_BL != IGNORE_INDEX).sum()
        for name, total in zip(DistillationTrainer.measures_named, sums[1:], strict=True):
            self.measure(name, total, n_tokens)
        return sums[0], n_tokens

    def open_cache(self, model: RunModel) -> SequenceCache | None:
        config, vocabulary = self.config.teacher, self.config.model_spec.model.vocab_size
        if not config.cache:
            return None
        setting = [*self.setting(model), config.top_k, vocabulary, self.loss.config.temperature]
        results = TopTokens.cached(vocabulary or 0, config.top_k)
        return SequenceCache(
            Path(config.cache), setting, results=results, verify=self.verifies_caches
        )

    def frozen_results(self, batch: Batch) -> dict[str, Tensor]:
        """Return the fields of `TopTokens`. Raise `UserError` if the vocabulary or the windows are
        sharded."""
        self.config.parallelism.require_one("tensor", "context", user="writing --teacher.cache")
        size, k = self.config.model_spec.model.vocab_size or 0, self.config.teacher.top_k

        def head(*outputs: Any, **changes: Any) -> TopTokens:
            return self.loss.top_tokens(Outputs(*outputs, **changes), size, k)

        inputs, images = (batch["input"], batch.get("attention")), images_in(batch)
        return vars(self.models["teacher"](*inputs, head=head, **images))


class OnPolicyTrainer(DistillationTrainer, RolloutTrainer):
    """Trainer of a student on its own answers to prompts: it learns the teacher's distributions at
    the answers' tokens, which count as given (Agarwal et al., arXiv:2306.13649, with lambda =
    1)."""

    @dataclass(kw_only=True, slots=True)
    class Config(DistillationTrainer.Config):
        """A whole run of on-policy distillation."""

        rollout: RolloutConfig = field(
            default_factory=lambda: RolloutConfig(group_size=1, overlong="keep")
        )
        """Sampling of answers."""

        def validate(self) -> None:
            DistillationTrainer.Config.validate(self)
            check_rollouts(self)
            why = "whose loss does not correct for the weights that sampled an answer"
            self.rollout.require_current("--config on_policy", why)
            if self.teacher.cache:
                raise UserError("--teacher.cache has no scores of new answers; leave it out")

    config: Config
    measures_named = (*DistillationTrainer.measures_named, *RolloutTrainer.trajectory_measures)

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        answers = self.packed(self.answers_to(super().next_micro_batches(batches)))
        self.tokens_per_step = (
            sum(batch["input"].numel() for batch in answers) * self.parallel_dims.dp_degree
        )
        return answers

    def answers_to(self, prompts: list[Batch]) -> list[Group]:
        """Return the answers to learn from in the next step."""
        self.watchdog.phase("rollouts")
        groups = self.sample(lambda: prompts, str(self.step + 1))
        self.measure_trajectories(groups)
        self.write_completions(groups)
        return groups

    def validation_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sums over one answer to each held-out prompt."""
        groups = self.sample(lambda: [batch], "validation", size=1)
        self.measure_trajectories(groups)
        answers = self.packed(groups)
        losses, weights = zip(*map(super().validation_sums, answers), strict=True)
        return torch.stack(losses).sum(), torch.stack(weights).sum()

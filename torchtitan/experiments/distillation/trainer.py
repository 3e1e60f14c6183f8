"""The trainer of distillation."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.distillation import DistillationLoss, Outputs, TopTokens
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.pretrained import internal_source
from torchtitan.protocols import ModelSpec
from torchtitan.tools.errors import UserError
from torchtitan.trainer.teacher import TeacherTrainer


class DistillationTrainer(TeacherTrainer):
    """Train a student to predict what a teacher predicts."""

    @dataclass(kw_only=True, slots=True)
    class Config(TeacherTrainer.Config):
        """A whole run of distillation."""

        def validate(self) -> None:
            if type(self.chosen_loss) is not DistillationLoss.Config:
                raise UserError("--module distillation has its own loss (--loss.kind), and takes no other")
            self.parallelism.require_one("pipeline", user="--module distillation")

        def teacher_spec(self) -> ModelSpec:
            if not self.teacher.path:
                raise UserError("--teacher.path is not set; name the folder of the model to learn from")
            try:
                return internal_source(self.teacher.path)[0]
            except UserError as error:
                raise UserError(f"--teacher.path: {error}") from error

    config: Config
    measures_named = ("cross_entropy", "divergence")

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch, and the number of its valid tokens."""
        inputs, labels_BL, has_grad = (batch["input"], batch.get("attention")), batch["labels"], torch.is_grad_enabled()
        sums: list[Tensor] = []

        def learn_from(teacher: Outputs | TopTokens) -> Tensor:
            def learn(*own: Any, **changes: Any) -> Tensor:
                sums.extend(self.loss(Outputs(*own, **changes), teacher, labels_BL))
                return sums[0]

            with torch.set_grad_enabled(has_grad):
                self.models["model"](*inputs, head=learn)
            return sums[0].detach()

        if self.cache:
            learn_from(TopTokens(batch["ids"], batch["log_probs"]))
        else:  # FSDP gathers output weights only while a head runs, so the student runs within the teacher's
            self.models["teacher"](*inputs, head=lambda *outputs, **changes: learn_from(Outputs(*outputs, **changes)))
        n_tokens = (labels_BL != IGNORE_INDEX).sum()
        for name, total in zip(self.measures_named, sums[1:], strict=True):
            self.measure(name, total, n_tokens)
        return sums[0], n_tokens

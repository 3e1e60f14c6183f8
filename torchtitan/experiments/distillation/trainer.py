"""The trainer of distillation."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.distillation import DistillationLoss, Outputs
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import PretrainedTokenizer, Tokenizer
from torchtitan.components.weights.assets import asset_folder
from torchtitan.models.pretrained import internal_source
from torchtitan.protocols import ModelSpec
from torchtitan.tools.errors import UserError
from torchtitan.trainer import RunModel, Trainer


@dataclass(kw_only=True, slots=True)
class TeacherConfig:
    """Frozen model whose distributions the trained one learns."""

    path: str = ""
    """Checkpoint of the teacher, in any format and of any family, with the student's tokenizer."""

    offload: bool = False
    """Keep its weights in CPU memory between uses; needs FSDP."""

    def spec(self, vocabulary: int) -> ModelSpec:
        """Return the teacher's specification. Raise `UserError` if it is no model of at least `vocabulary` tokens."""
        if not self.path:
            raise UserError("--teacher.path is not set; name the folder of the model to learn from")
        try:
            spec, _ = internal_source(self.path)
        except UserError as error:
            raise UserError(f"--teacher.path: {error}") from error
        if (size := spec.model.vocab_size or 0) < vocabulary:
            raise UserError(f"--teacher.path: {self.path} has a vocabulary of {size}, and the tokenizer {vocabulary}")
        return spec


class DistillationTrainer(Trainer):
    """Train a student to predict what a teacher predicts; see the package."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A whole run of distillation."""

        teacher: TeacherConfig = field(default_factory=TeacherConfig)
        """Teacher."""

        def validate(self) -> None:
            if type(self.chosen_loss) is not DistillationLoss.Config:
                raise UserError("--module distillation has its own loss (--loss.kind), and takes no other")
            if (degree := self.parallelism.pipeline_parallel_degree) > 1:
                raise UserError(
                    f"--parallelism.pipeline_parallel_degree {degree} cannot be combined with --module distillation; "
                    "set it to 1"
                )

        def check(self, world_size: int, *, dry_run: bool = False) -> None:
            Trainer.Config.check(self, world_size, dry_run=dry_run)
            tokenizer = self.tokenizer.build(path=self.hf_assets_path)
            size, taught = (
                spec.model.vocab_size
                for spec in (self.resolve(tokenizer).model_spec, self.teacher.spec(tokenizer.vocab_size))
            )
            if size != taught and (degree := self.parallelism.tensor_parallel_degree) > 1:
                raise UserError(
                    f"--parallelism.tensor_parallel_degree {degree} shards both vocabularies alike, but the student's "
                    f"has {size} rows, and the teacher's {taught}; set it to 1"
                )
            check_same(tokenizer, PretrainedTokenizer.Config().build(path=asset_folder(Path(self.teacher.path))))

    config: Config
    loss: DistillationLoss
    measures_named = ("cross_entropy", "divergence")

    def build_models(self) -> dict[str, RunModel]:
        teacher = self.config.teacher
        spec = teacher.spec(self.tokenizer.vocab_size)
        built = self.build_other_model(spec, weights=teacher.path, offloaded=teacher.offload)
        return {**super().build_models(), "teacher": built}

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch, and the number of its valid tokens."""
        labels_BL, has_grad, sums = batch["labels"], torch.is_grad_enabled(), []

        def forward(name: str, head: Any) -> None:
            self.models[name](batch["input"], batch.get("attention"), head=head)

        # Output weights are gathered only while a head runs, so the student runs within the teacher's.
        def teach(*outputs: Any, **changes: Any) -> Tensor:
            def learn(*own: Any, **own_changes: Any) -> Tensor:
                sums.extend(self.loss(Outputs(*own, **own_changes), Outputs(*outputs, **changes), labels_BL))
                return sums[0]

            with torch.set_grad_enabled(has_grad):
                forward("model", learn)
            return sums[0].detach()

        forward("teacher", teach)
        n_tokens = (labels_BL != IGNORE_INDEX).sum()
        for name, total in zip(self.measures_named, sums[1:], strict=True):
            self.measure(name, total, n_tokens)
        return sums[0], n_tokens


def check_same(student: Tokenizer, teacher: Tokenizer) -> None:
    """Raise `UserError` that names the first id with different text in two tokenizers."""
    if student.fingerprint == teacher.fingerprint:
        return

    def text_of(tokenizer: Tokenizer, token_id: int) -> str | None:
        # Twice, since decoding drops a space at the start of a text.
        return tokenizer.decode([token_id] * 2) if token_id < tokenizer.vocab_size else None

    for token_id in range(max(student.vocab_size, teacher.vocab_size)):
        ours, theirs = (text_of(tokenizer, token_id) for tokenizer in (student, teacher))
        if ours != theirs:
            raise UserError(
                f"--teacher.path: the tokenizers of teacher and student differ first in token {token_id}, which twice "
                f"is {theirs!r} for the teacher and {ours!r} for the student; choose a teacher with the same tokenizer"
            )

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

    def spec(self) -> ModelSpec:
        """Return the teacher's specification. Raise `UserError` if its folder holds no whole model."""
        if not self.path:
            raise UserError("--teacher.path is not set; name the folder of the model to learn from")
        try:
            return internal_source(self.path)[0]
        except UserError as error:
            raise UserError(f"--teacher.path: {error}") from error


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
            self.parallelism.require_one("pipeline", user="--module distillation")

        def check(self, world_size: int, *, dry_run: bool = False) -> None:
            Trainer.Config.check(self, world_size, dry_run=dry_run)
            tokenizer = self.tokenizer.build(path=self.hf_assets_path)
            specs = self.resolve(tokenizer).model_spec, self.teacher.spec()
            check_same(tokenizer, PretrainedTokenizer.Config().build(path=asset_folder(Path(self.teacher.path))))
            size, taught = (spec.model.vocab_size for spec in specs)
            if size != taught and (degree := self.parallelism.tensor_parallel_degree) > 1:
                raise UserError(
                    f"--parallelism.tensor_parallel_degree {degree} shards both vocabularies alike, but the student's "
                    f"has {size} rows, and the teacher's {taught}; set it to 1"
                )

    config: Config
    loss: DistillationLoss
    measures_named = ("cross_entropy", "divergence")

    def build_models(self) -> dict[str, RunModel]:
        config = self.config.teacher
        teacher = self.build_other_model(config.spec(), weights=config.path, offloaded=config.offload)
        return {**super().build_models(), "teacher": teacher}

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch, and the number of its valid tokens."""
        inputs, labels_BL, has_grad = (batch["input"], batch.get("attention")), batch["labels"], torch.is_grad_enabled()
        sums: list[Tensor] = []

        # FSDP gathers output weights only while a head runs, so the student runs within the teacher's.
        def teach(*outputs: Any, **changes: Any) -> Tensor:
            def learn(*own: Any, **own_changes: Any) -> Tensor:
                sums.extend(self.loss(Outputs(*own, **own_changes), Outputs(*outputs, **changes), labels_BL))
                return sums[0]

            with torch.set_grad_enabled(has_grad):
                self.models["model"](*inputs, head=learn)
            return sums[0].detach()

        self.models["teacher"](*inputs, head=teach)
        n_tokens = (labels_BL != IGNORE_INDEX).sum()
        for name, total in zip(self.measures_named, sums[1:], strict=True):
            self.measure(name, total, n_tokens)
        return sums[0], n_tokens


def check_same(student: Tokenizer, teacher: Tokenizer) -> None:
    """Raise `UserError` that names the first id with different text in two tokenizers."""
    if student.fingerprint == teacher.fingerprint:
        return

    for token_id in range(max(student.vocab_size, teacher.vocab_size)):
        ours, theirs = (  # twice, since decoding drops a space at the start of a text
            tokenizer.decode([token_id] * 2) if token_id < tokenizer.vocab_size else None
            for tokenizer in (student, teacher)
        )
        if ours != theirs:
            raise UserError(
                f"--teacher.path: the tokenizers of teacher and student differ first in token {token_id}, which twice "
                f"is {theirs!r} for the teacher and {ours!r} for the student; choose a teacher with the same tokenizer"
            )

"""`TeacherTrainer`: a trainer with a frozen teacher, which runs with the trained model or is read from a cache."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.distillation import DistillationLoss, Outputs, TopTokens
from torchtitan.components.sequence_cache import SequenceCache
from torchtitan.components.tokenizer import PretrainedTokenizer, Tokenizer
from torchtitan.components.weights.assets import asset_folder
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import ModelSpec
from torchtitan.tools.errors import UserError, require
from torchtitan.trainer.models import RunModel
from torchtitan.trainer.reference import FrozenModelTrainer, check_cache


@dataclass(kw_only=True, slots=True)
class TeacherConfig:
    """Frozen model whose distributions the trained one learns."""

    path: str = ""
    """Checkpoint of the teacher, in any format and of any family, with the student's tokenizer."""

    offload: bool = False
    """Keep its weights in CPU memory between uses; needs FSDP."""

    cache: str = ""
    """Folder for its likeliest tokens in all data, written before the first step. Empty: it runs with the student."""

    top_k: int = 64
    """Tokens per position to write; all others are one event."""


class TeacherTrainer(FrozenModelTrainer):
    """A trainer whose `compute_loss` compares the trained model with `models["teacher"]` or, if there is a cache, with
    the `ids` and `log_probs` of the batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(FrozenModelTrainer.Config):
        """A whole run with a teacher."""

        teacher: TeacherConfig = field(default_factory=TeacherConfig)
        """Teacher."""

        def teacher_spec(self) -> ModelSpec:
            """Return the teacher's specification. Raise `UserError` if its folder holds no whole model."""
            raise NotImplementedError

        def check_layout(self, world_size: int) -> ParallelDims:
            dims = FrozenModelTrainer.Config.check_layout(self, world_size)
            if self.teacher.offload:
                dims.require_fsdp("--teacher.offload")
            return dims

        def check(self, world_size: int, *, dry_run: bool = False) -> None:
            FrozenModelTrainer.Config.check(self, world_size, dry_run=dry_run)
            teacher, tokenizer = self.teacher, self.tokenizer.build(path=self.hf_assets_path)
            specs = self.resolve(tokenizer).model_spec, self.teacher_spec()
            if not dry_run:  # which has no tokenizer
                check_same(tokenizer, PretrainedTokenizer.Config().build(path=asset_folder(Path(teacher.path))))
            size, taught = (int(spec.model.vocab_size or 0) for spec in specs)
            if size != taught:
                vocabularies = f"a student's vocabulary of {size} rows and a teacher's of {taught}"
                self.parallelism.require_one("tensor", user=vocabularies)
            if teacher.cache:
                check_cache(self, "--teacher.cache", dry_run=dry_run)
                valid = f"from 1 to the student's vocabulary, {size}, which the teacher's, {taught}, must cover"
                require(0 < teacher.top_k <= size <= taught, "--teacher.top_k", teacher.top_k, valid)

    config: Config
    loss: DistillationLoss
    frozen = "teacher"

    def build_models(self) -> dict[str, RunModel]:
        config, spec = self.config.teacher, self.config.teacher_spec()
        teacher = self.build_other_model(spec, weights=config.path, offloaded=config.offload)
        return {**super().build_models(), "teacher": teacher}

    def open_cache(self, model: RunModel) -> SequenceCache | None:
        config, vocabulary = self.config.teacher, self.config.model_spec.model.vocab_size
        if not config.cache:
            return None
        setting = [*self.setting(model), config.top_k, vocabulary, self.loss.config.temperature]
        return SequenceCache(Path(config.cache), setting, bytes_per_token=8 * config.top_k + 4)

    def frozen_results(self, batch: Batch) -> dict[str, Tensor]:
        """Return the fields of `TopTokens`. Raise `UserError` if the vocabulary or the windows are sharded."""
        self.config.parallelism.require_one("tensor", "context", user="writing --teacher.cache")
        size, k = self.config.model_spec.model.vocab_size or 0, self.config.teacher.top_k

        def head(*outputs: Any, **changes: Any) -> TopTokens:
            return self.loss.top_tokens(Outputs(*outputs, **changes), size, k)

        return vars(self.models["teacher"](batch["input"], batch.get("attention"), head=head))


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

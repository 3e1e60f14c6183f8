"""`TeacherTrainer`: a trainer with a frozen teacher, which runs with the trained model or is read from a cache."""

import contextlib
import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtitan.components.checkpoint.identity import RunIdentity
from torchtitan.components.data.base import Batch
from torchtitan.components.distillation import DistillationLoss, Outputs, TopTokens
from torchtitan.components.teacher_cache import TeacherCache
from torchtitan.components.tokenizer import PretrainedTokenizer, Tokenizer
from torchtitan.components.weights.assets import asset_folder
from torchtitan.components.weights.sources import base_weights
from torchtitan.distributed.process_group import on_all_ranks
from torchtitan.protocols import ModelSpec
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.trainer.models import RunModel
from torchtitan.trainer.trainer import Trainer


@dataclass(kw_only=True, slots=True)
class TeacherConfig:
    """Frozen model whose distributions the trained one learns."""

    path: str = ""
    """Checkpoint of the teacher, in any format and of any family, with the student's tokenizer."""

    offload: bool = False
    """Keep its weights in CPU memory between uses; needs FSDP."""

    cache: str = ""
    """Folder of its likeliest tokens for the data. With `path`, the run only writes it; without, it trains with it."""

    top_k: int = 64
    """Tokens per position to write; all others are one event."""


class TeacherTrainer(Trainer):
    """A trainer whose `compute_loss` compares the trained model with `models["teacher"]` or, if there is a `cache`,
    with the `ids` and `log_probs` of the batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A whole run with a teacher."""

        teacher: TeacherConfig = field(default_factory=TeacherConfig)
        """Teacher."""

        def teacher_spec(self) -> ModelSpec:
            """Return the teacher's specification. Raise `UserError` if its folder holds no whole model."""
            raise NotImplementedError

        def check(self, world_size: int, *, dry_run: bool = False) -> None:
            Trainer.Config.check(self, world_size, dry_run=dry_run)
            teacher, tokenizer = self.teacher, self.tokenizer.build(path=self.hf_assets_path)
            if teacher.cache and dry_run:
                raise UserError("--teacher.cache cannot be combined with a dry run, which reads no data; leave it out")
            if teacher.cache and (self.training.batch_schedule or self.training.seq_len_schedule):
                raise UserError(
                    "--teacher.cache needs batches of one size; leave out batch_schedule and seq_len_schedule"
                )
            if teacher.cache and not teacher.path:
                if not Path(teacher.cache).is_dir():
                    raise UserError(f"--teacher.cache {teacher.cache} does not exist; write it with --teacher.path")
                return
            specs = self.resolve(tokenizer).model_spec, self.teacher_spec()
            if not dry_run:  # which has no tokenizer
                check_same(tokenizer, PretrainedTokenizer.Config().build(path=asset_folder(Path(teacher.path))))
            size, taught = (int(spec.model.vocab_size or 0) for spec in specs)
            if size != taught and (degree := self.parallelism.tensor_parallel_degree) > 1:
                raise UserError(
                    f"--parallelism.tensor_parallel_degree {degree} shards both vocabularies alike, but the student's "
                    f"has {size} rows, and the teacher's {taught}; set it to 1"
                )
            if teacher.cache:
                self.parallelism.require_one("tensor", "context", user="writing --teacher.cache")
                if not 0 < teacher.top_k <= size <= taught:
                    known = f"the student's vocabulary, {size}, which the teacher's, {taught}, must cover"
                    raise UserError(f"--teacher.top_k is {teacher.top_k}, but must be from 1 to {known}")

    config: Config
    loss: DistillationLoss
    cache: TeacherCache | None = None

    def build_models(self) -> dict[str, RunModel]:
        config, models = self.config.teacher, super().build_models()
        if config.cache:
            size, temperature = self.config.model_spec.model.vocab_size, self.loss.config.temperature
            self.cache = TeacherCache(config.cache, [self.tokenizer.fingerprint, size, temperature])
        if config.cache and not config.path:
            return models
        teacher = self.build_other_model(self.config.teacher_spec(), weights=config.path, offloaded=config.offload)
        return {**models, "teacher": teacher}

    def identity(self) -> RunIdentity:
        identity = super().identity()
        if not self.cache or "teacher" in self.models:
            return identity
        return replace(identity, properties={**identity.properties, "teacher": self.cache.teacher()})

    def train(self) -> None:
        """Train, or write the cache if there is a teacher too."""
        if not (self.cache and "teacher" in self.models):
            return super().train()
        with contextlib.closing(self.metrics), self.precision.fixed_weights(), self.mixed_precision():
            self.load_checkpoint()
            self.write_cache(self.cache)

    def write_cache(self, cache: TeacherCache) -> None:
        """Write what the cache lacks of the run's steps and of validation."""
        config, teacher, k = self.config, self.models["teacher"], self.config.teacher.top_k
        identity = [base_weights(teacher.weights)["digest"], teacher.spec.model.to_dict(), k]
        self.ranks.broadcast_from_rank0(lambda: cache.claim([*identity, config.training.mixed_precision_param]))

        def head(*outputs: Any, **changes: Any) -> TopTokens:
            return self.loss.top_tokens(Outputs(*outputs, **changes), config.model_spec.model.vocab_size or 0, k)

        data = [(config.dataloader, config.training.epochs, self.run_length.data_steps(self.total_steps))]
        data += [(loader, 1, config.validator.steps) for loader in config.validation_dataloaders().values()]
        for loader_config, epochs, steps in data:
            with contextlib.closing(self.build_dataloader(loader_config, epochs=epochs)) as loader:
                n_windows = steps * self.global_batch_size if steps > 0 else loader.n_samples or 0
                size = n_windows * config.training.seq_len * (8 * k + 4) / 2**20
                logger.info("%s: at most %d windows, %.1f MiB (0: a stream)", cache.folder, n_windows, size)
                for batch in itertools.islice(loader, steps * self.gradient_accumulation_steps if steps > 0 else None):
                    if loader.n_samples is None and on_all_ranks(loader.exhausted):
                        break
                    if not on_all_ranks(all(file.exists() for file in cache.files(batch))):
                        inputs = super().post_dataloading_process(batch)
                        cache.write(batch, teacher(inputs["input"], inputs.get("attention"), head=head))
        logger.info("%s is complete; train with it without --teacher.path", cache.folder)

    def post_dataloading_process(self, batch: Batch) -> Batch:
        return super().post_dataloading_process({**batch, **self.cache.read(batch)} if self.cache else batch)


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

"""Evaluation tasks during training."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.components.evaluation import Scorer
from torchtitan.components.evaluation.tasks import SUFFIXES, evaluate_file, read_questions, read_text
from torchtitan.config.sections import require_at_least
from torchtitan.tools.errors import UserError
from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.outcome import StepOutcome


class Evaluation(Callback):
    """Score the model on files every `freq` steps and after the last one: multiple choice, and perplexity of a text.

    The numbers are those of `torchtitan eval`, with `training.seq_len` as the context, computed on every rank, as FSDP
    requires. Raises `UserError` under tensor, context or pipeline parallelism.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Callback.Config):
        """Evaluation tasks during training."""

        files: list[str] = field(default_factory=list)
        """Questions (.jsonl with query, choices and gold) and texts (.txt, .md), as for torchtitan eval."""

        freq: int = 500
        """Training steps between evaluations."""

        limit: int | None = None
        """Maximum questions per file. None: all."""

        batch_size: int = 8
        """Sequences per forward pass."""

        def validate(self) -> None:
            require_at_least(1, callbacks__evaluation__freq=self.freq)
            require_at_least(1, callbacks__evaluation__batch_size=self.batch_size)
            for path in map(Path, self.files):
                if path.suffix not in SUFFIXES:
                    raise UserError(f"--callbacks.evaluation.files: '{path}' is not one of {', '.join(SUFFIXES)}")
                if not path.is_file():
                    raise UserError(f"--callbacks.evaluation.files: there is no file '{path}'")
                _ = read_questions(path, self.limit) if path.suffix == ".jsonl" else read_text(path)

    config: Config

    def __init__(self, config: Config, *, trainer: Any):
        super().__init__(config, trainer=trainer)
        dims = trainer.parallel_dims
        if config.files and max(dims.tp, dims.cp, dims.pp) > 1:
            raise UserError(
                "--callbacks.evaluation.files goes with data parallelism only; under tensor, context or pipeline "
                "parallelism evaluate the checkpoints: torchtitan eval"
            )

    def after_step(self, outcome: StepOutcome) -> None:
        trainer = self.trainer
        if not self.config.files or (trainer.step % self.config.freq and trainer.should_continue_training()):
            return
        with trainer.metrics.exclude(), trainer.autocast():
            (model,) = trainer.model_parts
            length = trainer.config.training.seq_len
            scorer = Scorer(model, batch_size=self.config.batch_size, max_seq_len=length, device=trainer.device)
            for path in map(Path, self.config.files):
                numbers = evaluate_file(path, scorer, trainer.tokenizer, self.config.limit)
                trainer.metrics.log_evaluation(trainer.step, path.stem, numbers)

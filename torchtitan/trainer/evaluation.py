"""Evaluation tasks during training."""

from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.components.evaluation import Scorer
from torchtitan.components.evaluation.tasks import (
    SUFFIXES,
    evaluate_file,
    read_questions,
    read_text,
    reject_images,
)
from torchtitan.config.sections import require_at_least
from torchtitan.tools.errors import UserError
from torchtitan.trainer.callbacks import PeriodicEvaluation
from torchtitan.trainer.run import Sections


class Evaluation(PeriodicEvaluation):
    """Score the model on files every `freq` steps and after the last one: multiple choice, and
    perplexity of a text.

    The scores equal those of `torchtitan eval` with `training.seq_len` as the context.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PeriodicEvaluation.Config):
        """Evaluation tasks during training."""

        files: list[str] = field(default_factory=list)
        """Questions (.jsonl with query, choices and gold) and texts (.txt, .md), as for torchtitan
        eval."""

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
                    raise UserError(
                        f"--callbacks.evaluation.files: '{path}' is not one of "
                        f"{', '.join(SUFFIXES)}"
                    )
                if not path.is_file():
                    raise UserError(f"--callbacks.evaluation.files: there is no file '{path}'")
                if path.suffix == ".jsonl":
                    reject_images(read_questions(path, self.limit))
                else:
                    read_text(path)

        def check_run(self, run: Sections) -> None:
            if self.files:
                user = "--callbacks.evaluation.files (evaluate the checkpoints: torchtitan eval)"
                run.parallelism.require_one("tensor", "context", "pipeline", user=user)

    config: Config

    @property
    def period(self) -> int:
        return self.config.freq if self.config.files else 0

    def evaluate(self) -> None:
        """Score the model on all files."""
        trainer = self.trainer
        with trainer.evaluated_weights(), trainer.mixed_precision():
            (model,) = trainer.model_parts
            length = trainer.config.training.seq_len
            scorer = Scorer(
                model, batch_size=self.config.batch_size, max_seq_len=length, device=trainer.device
            )
            for path in map(Path, self.config.files):
                numbers = evaluate_file(path, scorer, trainer.tokenizer, self.config.limit)
                trainer.metrics.log_evaluation(trainer.step, path.stem, numbers)

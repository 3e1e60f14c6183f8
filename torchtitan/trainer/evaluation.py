"""Evaluation tasks during training."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torchtitan.components.checkpoint.state import kept_random_state
from torchtitan.components.evaluation.scoring import Scorer, Share
from torchtitan.components.evaluation.tasks import (
    SUFFIXES,
    check_harness,
    evaluate_file,
    mean_centered,
    read_questions,
    read_text,
    reject_others,
)
from torchtitan.components.evaluation.validate import split_name
from torchtitan.components.generation import continuation_stop_ids
from torchtitan.config.code import CodeFolder
from torchtitan.config.sections import require_at_least
from torchtitan.tools.errors import UserError
from torchtitan.trainer.callbacks import PeriodicEvaluation, refuse_scores
from torchtitan.trainer.run import Run, Sections

if TYPE_CHECKING:
    from torchtitan.components.evaluation.lm_eval_adapter import HarnessTasks

_FOLDER_OPTION = "--callbacks.evaluation.include_path"

MEAN = "mean"
"""Name of the mean over tasks in metrics."""


class Evaluation(PeriodicEvaluation):
    """Score the model on files and tasks of lm-eval every `freq` steps and after the last one.

    The scores equal those of `torchtitan eval` with `training.seq_len` as the context.
    Data-parallel ranks divide the batches. Nothing that training depends on changes: weights,
    random numbers and compiled code stay as they are.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PeriodicEvaluation.Config):
        """Evaluation tasks during training."""

        files: list[str] = field(default_factory=list)
        """Questions (.jsonl with query, choices and gold) and texts (.txt, .md), as for torchtitan
        eval, each as FILE or NAME=FILE; the default name is the file's."""

        tasks: list[str] = field(default_factory=list)
        """Names of lm-eval's tasks (extra eval)."""

        include_path: CodeFolder = ""
        """Folder with further lm-eval tasks in YAML, whose code is executed."""

        freq: int = 500
        """Training steps between evaluations."""

        limit: int | None = None
        """Maximum questions per file, and examples per task. None: all."""

        batch_size: int = 8
        """Sequences per forward pass."""

        def validate(self) -> None:
            require_at_least(1, callbacks__evaluation__freq=self.freq)
            require_at_least(1, callbacks__evaluation__batch_size=self.batch_size)
            require_at_least(1, callbacks__evaluation__limit=self.limit)
            for path in self.named_files().values():
                if path.suffix not in SUFFIXES:
                    raise UserError(
                        f"--callbacks.evaluation.files: '{path}' is not one of "
                        f"{', '.join(SUFFIXES)}; name lm-eval's tasks with "
                        "--callbacks.evaluation.tasks"
                    )
                if not path.is_file():
                    raise UserError(f"--callbacks.evaluation.files: there is no file '{path}'")
                if path.suffix == ".jsonl":
                    reject_others(read_questions(path, self.limit))
                else:
                    read_text(path)
            check_harness(self.tasks, self._folder, _FOLDER_OPTION)
            if self.include_path and not self.tasks:
                raise UserError(
                    "--callbacks.evaluation.include_path is for --callbacks.evaluation.tasks, "
                    "which names no task"
                )

        def named_files(self) -> dict[str, Path]:
            """Return name → file. Raise `UserError` for a name of two tasks."""
            pairs = [split_name(text, default=Path(text).stem) for text in self.files]
            for name, count in Counter([MEAN, *self.tasks, *(name for name, _ in pairs)]).items():
                if count > 1:
                    raise UserError(
                        f"--callbacks.evaluation: '{name}' names two results; name the file "
                        f"otherwise ({name}2=FILE)"
                    )
            return {name: Path(path) for name, path in pairs}

        def evaluates(self, task: str) -> bool:
            """Return whether there is a result of this name. With lm-eval's tasks, always return
            True, since the tasks of a group have their own results."""
            return bool(self.tasks) or (bool(self.files) and task in (MEAN, *self.named_files()))

        def load_tasks(self) -> "HarnessTasks":
            """Load the tasks of lm-eval. Raise `UserError` for an unknown one, or data that cannot
            be read."""
            with kept_random_state():
                from torchtitan.components.evaluation.lm_eval_adapter import HarnessTasks

                return HarnessTasks(self.tasks, self._folder, option=_FOLDER_OPTION)

        @property
        def _folder(self) -> Path | None:
            return Path(self.include_path) if self.include_path else None

        def is_on(self, run: Run) -> bool:
            return bool(self.files or self.tasks)

        def check_run(self, run: Sections) -> None:
            if self.files or self.tasks:
                user = "--callbacks.evaluation (evaluate the checkpoints: torchtitan eval)"
                run.parallelism.require_one("context", "pipeline", user=user)
                refuse_scores(run, "--callbacks.evaluation")
            if self.tasks:
                self.load_tasks()

    config: Config

    def __init__(self, config: Config, *, trainer: Run):
        super().__init__(config, trainer=trainer)
        self.files = config.named_files()
        self.tasks = config.load_tasks() if config.tasks else None
        if self.tasks is not None:
            self.tasks.check_context(trainer.config.training.seq_len)
            if taken := {MEAN, *self.files} & self.tasks.members:
                raise UserError(
                    f"--callbacks.evaluation: '{min(taken)}' names two results, one of a group of "
                    "tasks; name the file otherwise"
                )

    @property
    def period(self) -> int:
        return self.config.freq

    def evaluate(self) -> None:
        """Score the model on all files and tasks."""
        trainer = self.trainer
        with trainer.evaluated_weights(), trainer.mixed_precision(), kept_random_state():
            (model,) = trainer.model_parts
            scorer = Scorer(
                model,
                batch_size=self.config.batch_size,
                max_seq_len=trainer.config.training.seq_len,
                device=trainer.device,
                share=share_of(trainer),
            )
            results: dict[str, dict[str, Any]] = {
                name: evaluate_file(path, scorer, trainer.tokenizer, self.config.limit)
                for name, path in self.files.items()
            }
            if self.tasks is not None:
                results |= self._evaluate_tasks(self.tasks, scorer)
            members = self.tasks.members if self.tasks else set()
            for name, numbers in {**results, MEAN: mean_centered(results, members)}.items():
                known = {key: value for key, value in numbers.items() if _is_number(value)}
                if known:
                    trainer.report_measured(
                        trainer.metrics.log_evaluation(trainer.step, name, known)
                    )

    def _evaluate_tasks(
        self, tasks: "HarnessTasks", scorer: Scorer
    ) -> dict[str, dict[str, object]]:
        from torchtitan.components.evaluation.lm_eval_adapter import TorchtitanLM

        tokenizer = self.trainer.tokenizer
        folders = [tokenizer.folder] if tokenizer.folder else []
        ids = continuation_stop_ids(tokenizer, folders)
        model = TorchtitanLM(scorer, tokenizer, ids)
        found = tasks.evaluate(model, self.config.limit, with_stderr=False)
        return {
            name: {key.removesuffix(",none"): value for key, value in numbers.items()}
            for name, numbers in found.items()
        }


def share_of(trainer: Run) -> Share:
    """Return this rank's share of work that the data-parallel ranks of a run divide."""
    dims = trainer.parallel_dims
    group = dist.group.WORLD if dist.is_initialized() else None
    return Share(dims.dp_rank, dims.dp_degree, group)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

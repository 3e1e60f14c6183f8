"""Metrics that options choose by name, such as for early stopping: whether a run measures them."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torchtitan.tools.errors import UserError, suggest
from torchtitan.tools.logging import logger
from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.run import Run, Sections
from torchtitan.trainer.step_result import StopReason

_LOSSES_ELSEWHERE = ("eval_loss", "eval/loss", "val_loss", "val/loss")
"""Names of the loss of held-out data in other libraries."""


def check_measured(run: Sections, metric: str, option: str) -> None:
    """Raise `UserError` if no validation or evaluation of a run can measure `metric`, the value of
    `option`. A metric with another name may be one of the user's own callbacks."""
    has_own = any(not type(one).__module__.startswith("torchtitan.") for one in run.callbacks)
    if metric in _LOSSES_ELSEWHERE and not has_own:
        raise UserError(f"{option} {metric}: the loss of held-out data is validation_loss here")
    if metric.startswith("validation") and not run.validator.enable:
        raise UserError(f"{option} {metric} needs --validator.enable")
    if not metric.startswith("evaluation/"):
        return
    task = _task_of(metric)
    if not any(callback.evaluates(task) for callback in run.callbacks):
        raise UserError(
            f"{option} {metric}: the run evaluates no '{task}'; name it in "
            "--callbacks.evaluation.files or .tasks, or --callbacks.answers.dataset"
        )


def _task_of(metric: str) -> str:
    return metric.removeprefix("evaluation/").rpartition("/")[0]


class ChosenMetric:
    """The metric that an `option` of a run names."""

    def __init__(self, name: str, option: str, trainer: Run):
        self.name, self.option = name, option
        self.trainer = trainer
        self.is_known = False
        """True once a validation or evaluation could measure the metric."""
        self._start = 0  # last step before this process
        self._reason: StopReason | None = None  # of the run's end

    def is_due(self, numbers: Mapping[str, float]) -> bool:
        """Return whether the `numbers` of a validation, or of a task of an evaluation, have the
        metric, or leave it out since there was nothing to measure. Raise `UserError` if they are
        those that should have it, and never will."""
        is_due = self.name in numbers or self._is_left_out(numbers)
        self.is_known |= is_due
        return is_due

    def _is_left_out(self, numbers: Mapping[str, float]) -> bool:
        is_validation = self.name.startswith("validation") and "validation_loss" in numbers
        is_task = self.name.startswith("evaluation/") and any(
            name.startswith("evaluation/") and _task_of(name) == _task_of(self.name)
            for name in numbers
        )
        if not (is_validation or is_task):
            return False
        validator = self.trainer.validator
        possible = validator.measured_names() if is_validation and validator else []
        if not self.is_known and self.name not in possible:
            raise UserError(
                f"{self.option}: there is no '{self.name}', but "
                f"{', '.join(numbers)}{suggest(self.name, list(numbers))}"
            )
        return True

    def note_start(self) -> None:
        """Call this after the checkpoint is loaded."""
        self._start = self.trainer.step

    def note_end(self, reason: StopReason) -> None:
        self._reason = reason

    def close(self) -> None:
        """Warn if the metric was never measured, also not by a validation or evaluation after the
        last step. A complete run that is started again takes no step, and measures nothing."""
        has_trained = self.trainer.step > self._start
        ended = has_trained and self._reason not in (None, "stopped")
        self._reason = None
        if ended and not self.is_known:
            logger.warning("%s '%s' was never measured by this run", self.option, self.name)


class BestMetric(Callback):
    """Tell whether the run measures `checkpoint.best_metric`, which `keep_best` compares."""

    @dataclass(kw_only=True, slots=True)
    class Config(Callback.Config):
        """The metric of the best checkpoints."""

        def is_on(self, run: Run) -> bool:
            return run.config.checkpoint.keep_best

    config: Config

    def __init__(self, config: Callback.Config, *, trainer: Run):
        super().__init__(config, trainer=trainer)
        name = trainer.config.checkpoint.best_metric
        self.chosen = ChosenMetric(name, "--checkpoint.best_metric", trainer)

    def around_run(self) -> AbstractContextManager[object]:
        self.chosen.note_start()
        return super().around_run()

    def on_measured(self, numbers: Mapping[str, float]) -> None:
        self.chosen.is_due(numbers)

    def on_end(self, reason: StopReason) -> None:
        self.chosen.note_end(reason)

    def close(self) -> None:
        self.chosen.close()

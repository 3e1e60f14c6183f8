"""Early stopping: end a run whose validation or evaluation no longer improves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.config.goals import Goal, sign_of
from torchtitan.config.sections import require_at_least
from torchtitan.tools.errors import UserError, suggest
from torchtitan.tools.logging import logger
from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.run import Run, Sections
from torchtitan.trainer.step_result import StopReason


class EarlyStopping(Callback):
    """End the run after `patience` measurements of a metric in a row that are no better than the
    best one. A resumed run continues the count, as checkpoints contain it. A measurement without a
    number, such as of a validation without any verdict, is no improvement."""

    @dataclass(kw_only=True, slots=True)
    class Config(Callback.Config):
        """Early stopping."""

        metric: str = ""
        """Name of a number of validation or evaluation in metrics.jsonl, such as validation_loss or
        evaluation/quiz/accuracy. Empty: no early stopping."""

        patience: int = 3
        """Measurements in a row without improvement that end the run."""

        min_delta: float = 0.0
        """Smaller changes are no improvement."""

        goal: Goal = "auto"
        """Whether lower or higher is better; auto: by the name, for losses and accuracies."""

        def validate(self) -> None:
            require_at_least(1, callbacks__earlystopping__patience=self.patience)
            require_at_least(0, callbacks__earlystopping__min_delta=self.min_delta)
            if self.metric:
                self.sign()

        def sign(self) -> int:
            """Return -1 if lower is better, otherwise 1. Raise `UserError` if the name does not
            tell."""
            section = "--callbacks.earlystopping"
            return sign_of(
                self.metric, self.goal, option=f"{section}.metric", goal_option=f"{section}.goal"
            )

        @property
        def has_state(self) -> bool:
            return bool(self.metric)

        def check_run(self, run: Sections) -> None:
            if self.metric.startswith("validation") and not run.validator.enable:
                raise UserError(
                    f"--callbacks.earlystopping.metric {self.metric} needs --validator.enable"
                )

    config: Config

    def __init__(self, config: Config, *, trainer: Run):
        super().__init__(config, trainer=trainer)
        self.best: float | None = None
        self.best_step = 0
        self.without_improvement = 0
        self._reason: StopReason | None = None  # of the run's end

    def on_measured(self, numbers: Mapping[str, float]) -> None:
        metric = self.config.metric
        if not metric:
            return
        if metric not in numbers and not self._is_missing(numbers):
            return
        value, sign = numbers.get(metric, math.nan), self.config.sign()
        is_first = self.best is None and not math.isnan(value)
        if is_first or (
            self.best is not None and sign * (value - self.best) > self.config.min_delta
        ):
            self.best, self.best_step = value, self.trainer.step
            self.without_improvement = 0
        else:
            self.without_improvement += 1
        self._end_if_due()

    @property
    def _is_known(self) -> bool:
        """True once the metric was measured."""
        return self.best is not None or self.without_improvement > 0

    def _is_missing(self, numbers: Mapping[str, float]) -> bool:
        """Return whether the metric is missing in `numbers`, which may have it. Raise `UserError`
        if they never will."""
        metric = self.config.metric
        task, _, _ = metric.rpartition("/")
        is_validation = metric.startswith("validation") and "validation_loss" in numbers
        is_task = task.startswith("evaluation/") and any(
            name.rpartition("/")[0] == task for name in numbers
        )
        if not (is_validation or is_task):
            return False
        validator = self.trainer.validator
        possible = validator.measured_names() if is_validation and validator else []
        if not self._is_known and metric not in possible:
            raise UserError(
                f"--callbacks.earlystopping.metric: there is no '{metric}', but "
                f"{', '.join(numbers)}{suggest(metric, list(numbers))}"
            )
        return True

    def _end_if_due(self) -> None:
        if self.without_improvement >= self.config.patience:
            best = "NaN" if self.best is None else f"{self.best:.6g} after step {self.best_step}"
            self.trainer.end_early(
                f"{self.config.metric} has not improved in {self.without_improvement} "
                f"measurements, and its best value is {best} (--callbacks.earlystopping)"
            )

    def on_end(self, reason: StopReason) -> None:
        self._reason = reason

    def close(self) -> None:
        """Warn if the metric was never measured, also not by a validation or evaluation after the
        last step."""
        ended = self._reason not in (None, "stopped")
        self._reason = None
        if ended and self.config.metric and not self._is_known:
            logger.warning(
                "--callbacks.earlystopping.metric '%s' was never measured by this run",
                self.config.metric,
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "metric": self.config.metric,
            "best": self.best,
            "best_step": self.best_step,
            "without_improvement": self.without_improvement,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the count; a count of another metric is dropped."""
        if state["metric"] != self.config.metric:
            return
        self.best, self.best_step = state["best"], state["best_step"]
        self.without_improvement = state["without_improvement"]
        self._end_if_due()

"""Early stopping: end a run whose validation or evaluation no longer improves."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torchtitan.config.goals import Goal, sign_of
from torchtitan.config.sections import require_at_least
from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.chosen_metric import ChosenMetric, check_measured
from torchtitan.trainer.run import Run, Sections
from torchtitan.trainer.step_result import StopReason

_OPTION = "--callbacks.earlystopping.metric"


class EarlyStopping(Callback):
    """End the run after `patience` measurements of a metric in a row that do not improve on the
    best one. A resumed run continues the count, as checkpoints contain it. A measurement without a
    number, such as of a validation without any verdict, is not an improvement."""

    @dataclass(kw_only=True, slots=True)
    class Config(Callback.Config):
        """Early stopping."""

        metric: str = ""
        """Name of a number of validation or evaluation in metrics.jsonl, such as validation_loss or
        evaluation/quiz/accuracy. Empty: no early stopping."""

        patience: int = 3
        """Measurements in a row without improvement that end the run."""

        min_delta: float = 0.0
        """Smaller changes are not an improvement."""

        goal: Goal = "auto"
        """Direction of better values; auto: by the name, for losses and accuracies."""

        def validate(self) -> None:
            require_at_least(1, callbacks__earlystopping__patience=self.patience)
            require_at_least(0, callbacks__earlystopping__min_delta=self.min_delta)
            if self.metric:
                self.sign()

        def sign(self) -> int:
            """Return -1 if lower is better, otherwise 1. Raise `UserError` if the name does not
            tell."""
            goal_option = "--callbacks.earlystopping.goal"
            return sign_of(self.metric, self.goal, option=_OPTION, goal_option=goal_option)

        @property
        def has_state(self) -> bool:
            return bool(self.metric)

        def is_on(self, run: Run) -> bool:
            return bool(self.metric)

        def check_run(self, run: Sections) -> None:
            if self.metric:
                check_measured(run, self.metric, _OPTION)

    config: Config

    def __init__(self, config: Config, *, trainer: Run):
        super().__init__(config, trainer=trainer)
        self.best: float | None = None
        self.best_step = 0
        self.without_improvement = 0
        self.chosen = ChosenMetric(config.metric, _OPTION, trainer)

    def around_run(self) -> AbstractContextManager[object]:
        self.chosen.note_start()
        return super().around_run()

    def on_measured(self, numbers: Mapping[str, float]) -> None:
        if not self.chosen.is_due(numbers):
            return
        value, sign = numbers.get(self.config.metric, math.nan), self.config.sign()
        is_first = self.best is None and not math.isnan(value)
        if is_first or (
            self.best is not None and sign * (value - self.best) > self.config.min_delta
        ):
            self.best, self.best_step = value, self.trainer.step
            self.without_improvement = 0
        else:
            self.without_improvement += 1
        self._end_if_due()

    def _end_if_due(self) -> None:
        if self.without_improvement >= self.config.patience:
            best = "NaN" if self.best is None else f"{self.best:.6g} after step {self.best_step}"
            self.trainer.end_early(
                f"{self.config.metric} has not improved in {self.without_improvement} "
                f"measurements, and its best value is {best} (--callbacks.earlystopping)"
            )

    def on_end(self, reason: StopReason) -> None:
        self.chosen.note_end(reason)

    def close(self) -> None:
        self.chosen.close()

    def state_dict(self) -> dict[str, object]:
        return {
            "metric": self.config.metric,
            "sign": self.config.sign(),
            "best": self.best,
            "best_step": self.best_step,
            "without_improvement": self.without_improvement,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the count; a count of another metric or in the other direction is dropped."""
        sign = self.config.sign()
        # earlier versions saved no sign
        if (state["metric"], state.get("sign", sign)) != (self.config.metric, sign):
            return
        self.best, self.best_step = state["best"], state["best_step"]
        self.without_improvement = state["without_improvement"]
        self.chosen.is_known = self.best is not None or self.without_improvement > 0
        self._end_if_due()

"""The result of a training step, and the end of a run."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.tools.errors import RunFailure
from torchtitan.tools.logging import logger
from torchtitan.tools.process import COMMAND_VARIABLE

StopReason = Literal["completed", "ended early", "data ended", "stopped"]
"""Reason for the end of a run's loop."""


RANKS_FAILED = 5
"""Place of the number of failed ranks in what `Trainer.sum_result` returns."""


class NonFiniteError(RunFailure):
    """The loss or the gradient norm of a step was NaN or infinite."""


@dataclass(frozen=True)
class StepResult:
    """Numbers of a step, read from the device at once: the mean `loss` over the global batch, the
    `grad_norm` before clipping, and further means that `compute_loss` recorded. `spike` describes a
    spike, see `SpikeGuard`."""

    loss: float
    grad_norm: float
    stop_requested: bool
    data_exhausted: bool
    measures: Mapping[str, float] = field(default_factory=dict)
    spike: str = ""
    failed: bool = False
    """True if the data or the loss of a rank failed (`StepFailure`), so that the run ends."""
    step: int = 0
    data_step: int = 0
    """Number of its global batch in data order, including skipped batches (`skip_data`)."""
    skip: Tensor | None = None
    """1 on the device if it skips the update, otherwise 0; None: the host decides, by
    `is_taken`."""

    @property
    def is_read(self) -> bool:
        """True if the numbers are on the host, so that using them waits for nothing."""
        return True

    @property
    def is_finite(self) -> bool:
        """True if loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def is_taken(self) -> bool:
        """True if the optimizer updates the weights: the numbers are finite and no spike,
        and no rank has failed."""
        return self.is_finite and not self.spike and not self.failed

    def __str__(self) -> str:
        return f"loss {self.loss:.6g}, gradient norm {self.grad_norm:.6g}" + (
            f": {self.spike}" if self.spike else ""
        )


def log_stop_reason(
    reason: StopReason,
    step: int,
    total_steps: int,
    checkpoint: CheckpointManager.Config,
    *,
    early_end: str = "",
) -> None:
    """Log how a run ended after `step` of `total_steps`, and why if it ended early; if it was
    stopped, how to resume it."""
    if reason == "completed":
        logger.info("training completed: %d steps", step)
    elif reason == "ended early":
        logger.info("training ended after step %d of %d: %s", step, total_steps, early_end)
    elif reason == "data ended":
        logger.info("the data ended after step %d, before step %d", step, total_steps)
    elif checkpoint.saves:
        command = os.environ.get(COMMAND_VARIABLE, "run it again")
        logger.info("stopped after step %d; to resume: %s", step, command)
    else:
        missing = (
            "--checkpoint.load_only forbids it"
            if checkpoint.enable
            else "--checkpoint.enable saves"
        )
        logger.warning("stopped after step %d; nothing is saved (%s)", step, missing)

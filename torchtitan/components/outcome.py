"""What comes of a training step."""

import math
from dataclasses import dataclass

from torchtitan.tools.errors import RunFailure


class NonFiniteError(RunFailure):
    """The loss or the gradient norm of a step was NaN or infinite."""


@dataclass(frozen=True)
class StepOutcome:
    """What the host learns of a step, in the one read of device values that it makes per step.

    `loss` is the mean over all valid tokens of the global batch, `grad_norm` the norm before clipping.
    """

    loss: float
    grad_norm: float
    stop_requested: bool
    data_exhausted: bool

    @property
    def is_finite(self) -> bool:
        """Whether the step may be taken."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def __str__(self) -> str:
        """The numbers in words."""
        return f"loss {self.loss}, gradient norm {self.grad_norm}"

"""The training loop, its configuration, and modules that only the loop uses."""

from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.models import RunModel
from torchtitan.trainer.outcome import NonFiniteError, StepOutcome
from torchtitan.trainer.trainer import Trainer

__all__ = ["Callback", "NonFiniteError", "RunModel", "StepOutcome", "Trainer"]

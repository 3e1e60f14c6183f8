"""Training loop, its configuration, and modules that only the loop uses."""

from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.models import RunModel
from torchtitan.trainer.run import Run
from torchtitan.trainer.step_result import NonFiniteError, StepResult
from torchtitan.trainer.trainer import Trainer

__all__ = ["Callback", "NonFiniteError", "Run", "RunModel", "StepResult", "Trainer"]

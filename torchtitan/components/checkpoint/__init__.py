"""Checkpoints: save a run's state, complete or not at all, and resume from it on any number of
processes."""

from typing import TYPE_CHECKING

from torchtitan.components.checkpoint.catalog import CheckpointInfo, list_checkpoints, verify
from torchtitan.tools.deferred import deferred

if TYPE_CHECKING:
    from torchtitan.components.checkpoint.manager import CheckpointManager
    from torchtitan.components.checkpoint.resume import load_model_state
    from torchtitan.components.checkpoint.saver import CheckpointSaveError
    from torchtitan.components.checkpoint.state import ModelState, RandomState

__getattr__ = deferred(
    __name__,
    {
        "CheckpointManager": "manager",
        "CheckpointSaveError": "saver",
        "ModelState": "state",
        "RandomState": "state",
        "load_model_state": "resume",
    },
)

__all__ = [
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointSaveError",
    "ModelState",
    "RandomState",
]
__all__ += ["list_checkpoints", "load_model_state", "verify"]

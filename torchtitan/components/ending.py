"""How a run ended, and what it says then."""

import os
from typing import Literal

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.tools.logging import logger
from torchtitan.tools.process import COMMAND_VARIABLE

Ending = Literal["completed", "data ended", "stopped"]
"""Why a run's loop ended."""


def log_ending(ending: Ending, step: int, total_steps: int, checkpoint: CheckpointManager.Config) -> None:
    """Say how a run ended after `step` of `total_steps`, and how a stopped one goes on."""
    if ending == "completed":
        logger.info("training completed: %d steps", step)
    elif ending == "data ended":
        logger.info("the data ended after step %d, before step %d", step, total_steps)
    elif checkpoint.saves:
        command = os.environ.get(COMMAND_VARIABLE, "run it again")
        logger.info("stopped after step %d; to resume: %s", step, command)
    else:
        missing = "--checkpoint.load_only forbids it" if checkpoint.enable else "--checkpoint.enable saves"
        logger.warning("stopped after step %d; nothing is saved (%s)", step, missing)

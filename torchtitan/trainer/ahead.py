"""Rollouts of later steps (`--rollout.max_staleness`) in a run: the settings that exclude them, and
the callback that keeps them."""

from contextlib import AbstractContextManager
from typing import Any

from torchtitan.components.rollout.ahead import RolloutsAhead
from torchtitan.tools.errors import require
from torchtitan.tools.logging import logger
from torchtitan.trainer.callbacks import Callback


def check_ahead(config: Any) -> None:
    """Raise `UserError` for a run whose rollouts cannot begin before their step."""
    rollout = config.rollout
    user = f"--rollout.max_staleness {rollout.max_staleness}"
    why = "since its processes must end the same texts in the same pass, and rollouts may wait"
    config.parallelism.require_one("tensor", user=user, why=why)
    require(
        rollout.engine == "embedded",
        "--rollout.engine",
        rollout.engine,
        f"embedded with {user}, since a server takes weights between its requests only",
    )
    for name in ("skip_data", "batch_schedule"):
        why = "which reads prompts before the step in which this would take effect"
        value = getattr(config.training, name)
        require(not value, f"--training.{name}", value, f"empty with {user}, {why}")


class RolloutsInFlight(Callback):
    """Keep the rollouts of later steps (`RolloutTrainer.ahead`) through a run. After a return to a
    checkpoint, they begin again, since weights that no longer exist have sampled them."""

    trainer: Any

    def around_run(self) -> AbstractContextManager[object]:
        ahead: RolloutsAhead = self.trainer.ahead
        return ahead

    def on_return(self, step: int) -> None:
        n_dropped = self.trainer.ahead.drop()
        loader = self.trainer.dataloader
        loader.load_state_dict(loader.state_dict())
        logger.warning("%d rollouts in flight are dropped; their prompts are read again", n_dropped)

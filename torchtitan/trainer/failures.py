"""Errors of users' code in a run: the last complete step is saved before the run ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpoint import RandomState
from torchtitan.distributed.process_group import gather_objects, world_size
from torchtitan.tools.errors import RunFailure, SharedError, UserError, in_words
from torchtitan.tools.logging import logger
from torchtitan.tools.user_code import is_ctrl_c, user_frames, with_place


@dataclass(frozen=True)
class StepStart:
    """State before a step that changes before the weights do: position in the data, random numbers, counts."""

    n_updates: int
    counts: Mapping[str, Any]
    data: Mapping[str, Any]
    random: Mapping[str, Any]

    @classmethod
    def of(cls, trainer: Any) -> "StepStart":
        data, random = trainer.dataloader.state_dict(), RandomState().state_dict()
        return cls(trainer.optimizer.n_updates, trainer.state_dict(), data, random)

    def restore(self, trainer: Any) -> None:
        """Undo what a step has changed before its update."""
        trainer.load_state_dict(self.counts)
        trainer.dataloader.load_state_dict(self.data)
        RandomState().load_state_dict(self.random)


def save_last_step(trainer: Any, error: BaseException) -> None:
    """Save the last complete step of a `Trainer` that an error of the user's code or input ends. With several ranks,
    save only after a `SharedError`, since the others wait elsewhere. Nothing is saved if the weights are between two
    steps; then, or if the save fails, a warning says so."""
    is_alone = world_size() == 1 or isinstance(error, SharedError)
    if not is_alone or not trainer.step or not trainer.config.checkpoint.saves or not _is_of_user(error):
        return
    start, trainer.step_start = trainer.step_start, None
    if not trainer.is_step_complete and (start is None or start.n_updates != trainer.optimizer.n_updates):
        logger.warning("the weights are between steps %d and %d, and are not saved", trainer.step, trainer.step + 1)
        return
    try:
        if start is not None:
            start.restore(trainer)
        trainer.deferred.settle()
        trainer.metrics.flush()
        trainer.save(last=False, stopped=True, validation_loss=None)
        trainer.checkpointer.wait()
    except Exception as failure:
        logger.warning("step %d could not be saved: %s", trainer.step, in_words(failure))
    else:
        logger.info("step %d is saved; the run ends, and resumes there once the error is mended", trainer.step)


def _is_of_user(error: BaseException) -> bool:
    if isinstance(error, RunFailure) or is_ctrl_c(error):
        return False
    return isinstance(error, UserError) or not isinstance(error, Exception) or bool(user_frames(error))


def is_user_class(part: object) -> bool:
    """Return whether an object's class is not of this package."""
    return not type(part).__module__.startswith("torchtitan.")


def raise_on_all_ranks(failure: BaseException | None) -> None:
    """Raise a rank's failure, on the other ranks as a `UserError`. A collective."""
    failures = gather_objects(failure and with_place(failure))
    if failure is not None:
        raise failure
    for rank, text in enumerate(failures):
        if text:
            raise UserError(f"rank {rank} failed: {text}")

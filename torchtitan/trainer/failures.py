"""Errors of users' code in a run: the last complete step is saved before the run ends.

A callback that fails on one of several ranks does not stop its step, after which all ranks save and
end. After an error in the data or the loss, they do so before the update (`StepFailure`). After any
other error, they save if all ranks have failed at the same step (`Agreement`), as by a mistake in
code that each of them runs. A rank that fails alone ends the collectives of the others, which then
fail before their update: no rank updates weights before all have added up the step's result. NCCL's
collectives cannot be ended by one rank: there, nothing is saved.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torchtitan.components.checkpoint import RandomState, list_checkpoints
from torchtitan.distributed.connections import end_connections
from torchtitan.distributed.process_group import gather_objects, is_lost_rank, world_size
from torchtitan.tools.errors import SharedError, UserError, in_words
from torchtitan.tools.logging import logger
from torchtitan.tools.user_code import is_ctrl_c, is_of_user, with_place
from torchtitan.trainer.agreement import SECONDS, Agreement
from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.run import Run
from torchtitan.trainer.step_failure import PendingResult, StepFailure, describe

_FIRST_SECONDS = 1.0
"""Time that other ranks wait for the rank that failed to report its own error."""


@dataclass(frozen=True)
class StepStart:
    """State before a step that changes before the weights do, or with them if a rank reads the
    step's result late: position in the data, random numbers, counts, learning rate."""

    n_updates: int
    versions: Sequence[int]
    counts: Mapping[str, object]
    data: Callable[[], dict[str, object]]
    random: Mapping[str, object]
    schedule: Mapping[str, object]

    @classmethod
    def of(cls, trainer: "FailingRun") -> "StepStart":
        return cls(
            n_updates=trainer.optimizer.n_updates,
            versions=trainer.optimizer.versions(),
            counts=trainer.state_dict(),
            data=trainer.dataloader.present_state(),
            random=RandomState().state_dict(),
            schedule=trainer.lr_scheduler.state_dict(),
        )

    def after_skipped_update(self, trainer: "FailingRun") -> "StepStart":
        """Return the state if the device has skipped all updates since."""
        optimizer = trainer.optimizer
        return replace(self, n_updates=optimizer.n_updates, versions=optimizer.versions())

    def has_weights_of(self, trainer: "FailingRun") -> bool:
        """Return whether the weights still equal this state's."""
        optimizer = trainer.optimizer
        return self.n_updates == optimizer.n_updates and self.versions == optimizer.versions()

    def restore(self, trainer: "FailingRun") -> None:
        """Undo what a step has changed before its update."""
        trainer.load_state_dict(self.counts)
        trainer.dataloader.load_state_dict(self.data())
        RandomState().load_state_dict(self.random)
        trainer.lr_scheduler.load_state_dict(self.schedule)


class FailingRun(Run, Protocol):
    """A `Trainer` as the functions here see it."""

    agreement: Agreement
    step_failure: StepFailure
    step_start: StepStart | None
    is_step_complete: bool
    failure: BaseException | None

    @property
    def deferred(self) -> PendingResult: ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state_dict: Mapping[str, object], /) -> None: ...

    def save(self, *, last: bool, stopped: bool = False, validation_loss: float | None) -> None: ...


def save_last_step(trainer: FailingRun, error: BaseException) -> None:
    """Save the last complete step of a `Trainer` that an error of the user's code or data ends.
    With several ranks, save only after a `SharedError`, or if all ranks have failed at the same
    step; a rank that fails alone ends the collectives of the others. Say so if there is nothing to
    save, if the weights are between two steps, or if the save fails. Raise `UserError` instead of
    the error that another rank's failure has caused."""
    failure = trainer.agreement.announced() if is_lost_rank(error) else ""
    if failure or is_of_user(error) or error is trainer.step_failure.error:
        seconds = SECONDS if isinstance(error, SharedError) else _end_collectives(trainer, error)
        if trainer.config.checkpoint.saves:
            _save(trainer, error, seconds)
    if failure:
        time.sleep(_FIRST_SECONDS)
        raise UserError(failure) from error


def _end_collectives(trainer: FailingRun, error: BaseException) -> float:
    """End the collectives of the other ranks, which may wait for this rank. Return the seconds that
    these ranks get to fail as well: a step's timeout if their collectives end, since a computation
    cannot be ended."""
    if world_size() == 1:
        return SECONDS
    comm = trainer.config.comm
    failure = f"rank {trainer.rank} failed: {describe(error)}"
    trainer.agreement.announce(failure)
    # NCCL's collectives do not end with their connections.
    if trainer.device.type != "cpu" or not end_connections():
        return SECONDS
    if not is_lost_rank(error):
        # The error itself is printed when this process ends.
        logger.warning("rank %d failed; the other ranks end their step", trainer.rank)
    return float(comm.step_timeout_seconds or comm.train_timeout_seconds)


def _save(trainer: FailingRun, error: BaseException, seconds: float) -> None:
    if not trainer.step:
        logger.warning("nothing is saved, since the run has completed no step")
        return
    start, trainer.step_start = trainer.step_start, None
    is_complete = trainer.is_step_complete or (start is not None and start.has_weights_of(trainer))
    if not isinstance(error, SharedError) and not _save_together(trainer, is_complete, seconds):
        return
    if not is_complete:
        logger.warning(
            "the weights are between steps %d and %d, and are not saved",
            trainer.step,
            trainer.step + 1,
        )
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
        logger.info(
            "step %d is saved; the run ends, and resumes there once the error is mended",
            trainer.step,
        )


def _save_together(trainer: FailingRun, is_complete: bool, seconds: float) -> bool:
    """Return whether all ranks have failed at the same step within `seconds`, so that they can save
    it. Log the newest checkpoint if they have not, and that step is in none."""
    if world_size() == 1:
        return True
    saved = _saved_steps(trainer)
    if trainer.step in saved:
        return False
    state = {
        "step": trainer.step,
        "is_complete": is_complete,
        "is_pending": trainer.deferred.pending is not None,
    }
    if trainer.agreement.reach(state, seconds):
        return True
    newest = f"the newest checkpoint is of step {max(saved)}" if saved else "there is no checkpoint"
    logger.error(
        "step %d is not saved, since the ranks cannot save together; %s", trainer.step, newest
    )
    return False


def _saved_steps(trainer: FailingRun) -> list[int]:
    """Return the steps of the complete checkpoints; none if they cannot be listed."""
    try:
        checkpoints = list_checkpoints(trainer.checkpointer.folder)
    except Exception:  # the error that ends the run is the one to report
        return []
    return [info.step for info in checkpoints if info.is_complete]


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


@contextlib.contextmanager
def failure_kept(trainer: FailingRun, part: object) -> Iterator[None]:
    """Keep the first error in the block of a part of the run that a user wrote, as
    `Trainer.failure`, which ends the run once the step is complete."""
    try:
        yield
    except BaseException as error:
        if not is_user_class(part) or is_ctrl_c(error):
            raise
        trainer.failure = trainer.failure or error


@contextlib.contextmanager
def around_step(trainer: FailingRun, callback: Callback, step: int) -> Iterator[None]:
    """Enter the context of a callback around a step. Its errors are kept (`failure_kept`); errors
    of the step are passed to it."""
    with contextlib.ExitStack() as stack:
        with failure_kept(trainer, callback):
            stack.enter_context(callback.around_step(step))
        try:
            yield
        except BaseException as error:
            stack.pop_all().__exit__(type(error), error, error.__traceback__)
            raise
        with failure_kept(trainer, callback):
            stack.pop_all().close()

"""Errors of users' code in a run: the last complete step is saved before the run ends.

Of several ranks, one that fails cannot save: the others wait for it in collectives of the step. So
it continues. A callback that fails does not stop its step, after which all ranks end. A rank
without data or a loss computes with a substitute (`StandIns`) up to the point where all ranks learn
of the failure, and none of them takes the step.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpoint import RandomState, list_checkpoints
from torchtitan.components.data.base import Batch
from torchtitan.distributed.process_group import gather_objects, world_size
from torchtitan.tools.errors import RunFailure, SharedError, UserError, in_words
from torchtitan.tools.logging import logger
from torchtitan.tools.user_code import is_ctrl_c, user_frames, with_place


@dataclass(frozen=True)
class StepStart:
    """State before a step that changes before the weights do: position in the data, random numbers,
    counts."""

    n_updates: int
    counts: Mapping[str, Any]
    data: Callable[[], Mapping[str, Any]]
    random: Mapping[str, Any]

    @classmethod
    def of(cls, trainer: Any) -> "StepStart":
        data, random = trainer.dataloader.present_state(), RandomState().state_dict()
        return cls(trainer.optimizer.n_updates, trainer.state_dict(), data, random)

    def restore(self, trainer: Any) -> None:
        """Undo what a step has changed before its update."""
        trainer.load_state_dict(self.counts)
        trainer.dataloader.load_state_dict(self.data())
        RandomState().load_state_dict(self.random)


def save_last_step(trainer: Any, error: BaseException) -> None:
    """Save the last complete step of a `Trainer` that an error of the user's code or input ends.
    With several ranks, save only after a `SharedError`, since the others wait elsewhere. If the
    weights are between two steps, save nothing and warn. Also warn if the save fails."""
    if not trainer.step or not trainer.config.checkpoint.saves or not _is_of_user(error):
        return
    if world_size() > 1 and not isinstance(error, SharedError):
        saved = [
            info.step for info in list_checkpoints(trainer.checkpointer.folder) if info.is_complete
        ]
        newest = (
            f"the newest checkpoint is of step {max(saved)}" if saved else "there is no checkpoint"
        )
        logger.error(
            "the other ranks wait for this one elsewhere, so step %d is not saved; %s",
            trainer.step,
            newest,
        )
        return
    start, trainer.step_start = trainer.step_start, None
    if not trainer.is_step_complete and (
        start is None or start.n_updates != trainer.optimizer.n_updates
    ):
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


def _is_of_user(error: BaseException) -> bool:
    if isinstance(error, RunFailure) or is_ctrl_c(error):
        return False
    return (
        isinstance(error, UserError) or not isinstance(error, Exception) or bool(user_frames(error))
    )


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


def raise_shared(failure: BaseException | None) -> None:
    """Raise the failure of one or several ranks on all of them, as a `SharedError`. A
    collective."""
    failures = enumerate(gather_objects(failure and with_place(failure)))
    texts = [f"rank {rank} failed: {text}" for rank, text in failures if text]
    raise SharedError("; ".join(texts)) from failure


@contextlib.contextmanager
def deferred(trainer: Any, part: object) -> Iterator[None]:
    """Keep the first error in the block of a part of the run that a user wrote, as
    `Trainer.failure`, which ends the run once the step is complete."""
    try:
        yield
    except BaseException as error:
        if not is_user_class(part) or is_ctrl_c(error):
            raise
        trainer.failure = trainer.failure or error


@contextlib.contextmanager
def around_step(trainer: Any, callback: Any, step: int) -> Iterator[None]:
    """Enter the context of a callback around a step. Its errors are `deferred`; errors of the step
    are passed to it."""
    with contextlib.ExitStack() as stack:
        with deferred(trainer, callback):
            stack.enter_context(callback.around_step(step))
        try:
            yield
        except BaseException as error:
            stack.pop_all().__exit__(type(error), error, error.__traceback__)
            raise
        with deferred(trainer, callback):
            stack.pop_all().close()


class StandIns:
    """Substitute computations of a rank whose data or loss has failed, with the same collectives.

    For runs on CPUs, whose ranks read the result of each step before they update weights. An error
    inside of a model's forward pass, between two of them, or in a pipeline cannot be deferred, and
    ends the rank at once.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._is_on = world_size() > 1 and trainer.device.type == "cpu" and not trainer.pipeline
        self._batches: Sequence[Batch] = ()
        self._n_begun = 0
        self._outputs: list[Any] = []
        self.is_used = False
        """True if the step in progress has a stand-in on this rank, so that no rank must take
        it."""
        if self._is_on and is_user_class(trainer):
            for part in trainer.trained_parts:
                part.register_forward_pre_hook(self._begin)
                part.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._n_begun += 1

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._outputs.append(output)

    def batches(self, read: Callable[[], list[Batch]]) -> list[Batch]:
        """Return the next micro-batches of a step; after an error, repeat an earlier step's."""
        try:
            batches = read()
        except BaseException as error:
            if not self._batches:
                raise
            self._keep(error)
            return list(self._batches)
        if self._is_on and batches:
            self._batches = batches
        return batches

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss and weight of a batch; after an error, zeros that depend on the outputs
        of the models."""
        trainer = self._trainer
        self._n_begun = 0
        self._outputs = []
        try:
            loss: tuple[Tensor, Tensor] = trainer.compute_loss(batch)
            return loss
        except BaseException as error:
            are_plain = all(
                isinstance(value, Tensor) and not isinstance(value, DTensor)
                for value in self._outputs
            )
            is_inside = self._n_begun != len(self._outputs)
            if not is_user_class(trainer) or is_inside or not are_plain:
                raise
            outputs = [value for value in self._outputs if value.requires_grad]
            self._keep(error)
            return _zero_of(outputs or [trainer.forward(batch)]), torch.zeros(
                (), device=trainer.device
            )
        finally:
            self._outputs = []

    def head(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a loss, the head of a model. After an error in a user's loss, its result is 0."""
        if not (self._is_on and is_user_class(loss)):
            return loss

        def guarded(hidden_BLD: Tensor, weight_VD: Tensor, **inputs: Any) -> Tensor:
            try:
                return loss(hidden_BLD, weight_VD, **inputs)
            except BaseException as error:
                if isinstance(hidden_BLD, DTensor) or isinstance(weight_VD, DTensor):
                    raise
                self._keep(error)
                return _zero_of([hidden_BLD, weight_VD])

        return guarded

    def _keep(self, error: BaseException) -> None:
        if not self._is_on or is_ctrl_c(error) or isinstance(error, RunFailure):
            raise error
        self._trainer.failure = self._trainer.failure or error
        self.is_used = True


def _zero_of(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([(value.float() * 0).sum() for value in values]).sum()

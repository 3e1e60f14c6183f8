"""Results of steps that the host reads while the device computes the next step."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.tools.device import HostCopy
from torchtitan.trainer.step_result import StepResult


class LateResult(StepResult):
    """Result of a step whose update the device leaves out by itself if loss or gradient norm is not finite. Its numbers
    are copied to the host meanwhile; the first use of one waits for the copy."""

    _copy: HostCopy
    _read: Callable[[list[float]], StepResult]

    @classmethod
    def of(cls, values: Tensor, read: Callable[[list[float]], StepResult], **known: Any) -> "LateResult":
        """Return the result of `values` (`Trainer.sum_result`), which `read` interprets, with the fields `known`."""
        outcome = cls.__new__(cls)  # without the other fields, so that `__getattr__` is called for them
        skip = values[1:3].isfinite().all().logical_not().float()
        vars(outcome).update(known, skip=skip, _copy=HostCopy(values), _read=read)
        return outcome

    def __getattr__(self, name: str) -> Any:
        """Add all fields that are not known when one of them is used."""
        if name not in StepResult.__dataclass_fields__:
            raise AttributeError(name)
        vars(self).update(vars(self._read(self._copy.tolist())) | vars(self))
        return vars(self)[name]

    @property
    def is_read(self) -> bool:
        return "loss" in vars(self)


class LateResults:
    """Lets a `Trainer` take steps without waiting for their results, which it gets with the next step.

    A result is read in its own step where something other than the optimizer depends on it: logging, validation, a
    checkpoint, the last step, and in every step with the options in `_needs_results`.
    """

    device_types: ClassVar[Sequence[str]] = ("cuda",)  # others have nothing to wait for

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.pending: LateResult | None = None
        """The newest result, if the trainer has not acted on it yet."""
        self._micro_batches: Sequence[Batch] = ()
        self._action: Callable[[], None] = lambda: None
        self._is_on = trainer.device.type in self.device_types and not _needs_results(trainer)
        self._reads_next = True  # in the first step, and in the last one before a requested stop

    def result(self, micro_batches: Sequence[Batch], *sums: Tensor) -> StepResult:
        """Return the result of a step, given the arguments of `Trainer.read_result`, after acting on the one before."""
        trainer, step = self._trainer, self._trainer.step + 1
        self.settle()
        if not self._is_on or self._is_needed(step):
            result: StepResult = trainer.read_result(*sums)
            return result
        known = {"step": step, "data_step": trainer.run_length.data_step + 1}
        if trainer.has_data:  # then the data of all ranks has not ended
            known["data_exhausted"] = False
        outcome = LateResult.of(trainer.sum_result(*sums), trainer.result_of, **known)
        if not outcome.data_exhausted:
            self.pending, self._micro_batches, self._action = outcome, micro_batches, lambda: None
        return outcome

    def _is_needed(self, step: int) -> bool:
        """Return whether a step needs its result at once, equal on all ranks."""
        reads_next, self._reads_next = self._reads_next, False
        trainer, last = self._trainer, step >= self._trainer.total_steps
        validates = trainer.validator is not None and trainer.validator.is_due(step, last=last)
        saves = trainer.checkpointer.is_due(step, last=last)
        return reads_next or last or validates or saves or trainer.metrics.should_log(step)

    def when_known(self, outcome: StepResult, action: Callable[[], None]) -> None:
        """Call `action`, which needs the numbers of the newest result: at once, or when the trainer acts on it."""
        if outcome is self.pending:
            self._action = action
        else:
            action()

    def settle(self) -> None:
        """Act on the newest result, if that is still to be done. Raise what `Trainer.skip_step` raises."""
        outcome, self.pending = self.pending, None
        if outcome is None:
            return
        self._reads_next = outcome.stop_requested
        if not outcome.is_taken:
            self._trainer.skip_step(outcome, self._micro_batches)
        self._action()


def _needs_results(trainer: Any) -> bool:
    """Return whether each step needs its result, or the optimizer cannot leave out an update by itself."""
    config = trainer.config
    return (
        config.spikes.threshold is not None
        or config.spikes.action != "stop"
        or not config.spikes.advance_schedule
        or config.ema.decay is not None
        or config.debug.ledger
        or config.optimizer.early_step_in_backward
        or config.training.enable_cpu_offload
        or trainer.dataloader.adapts
        or trainer.has_own_update
        or not trainer.optimizer.can_skip
    )

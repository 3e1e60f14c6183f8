"""Step results that the host reads while the device computes the next step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.protocols import ModelConverter
from torchtitan.tools.device import HostCopy
from torchtitan.trainer.failures import FailingRun, StepStart
from torchtitan.trainer.step_result import RANKS_FAILED, StepResult


class DeferredNumbers:
    """Numbers of a step, on their way from the device to the host."""

    def __init__(self, values: Tensor, interpret: Callable[[list[float]], StepResult]):
        """`values` are those of `Trainer.sum_result`, and `interpret` is `Trainer.result_of`."""
        self._copy = HostCopy(values)
        self._interpret = interpret
        self._result: StepResult | None = None

    @property
    def is_read(self) -> bool:
        """True if the numbers are on the host, so that `wait` returns at once."""
        return self._result is not None

    def wait(self) -> StepResult:
        """Wait for the copy, and return the numbers."""
        if self._result is None:
            self._result = self._interpret(self._copy.tolist())
        return self._result


class DeferredResult(StepResult):
    """Result of a step whose update the device itself skips if loss or gradient norm is not finite.
    The first use of a number waits until it is on the host. `dataclasses.replace` waits too."""

    _numbers: DeferredNumbers | None
    _known: Mapping[str, object]

    def __init__(self, *, numbers: DeferredNumbers | None = None, **known: object):
        """`known` are the fields that need no numbers from the device; all of them without
        `numbers`."""
        object.__setattr__(self, "_numbers", numbers)
        object.__setattr__(self, "_known", known)
        for name in ("step", "data_step", "skip"):
            object.__setattr__(self, name, known[name])

    def _value(self, name: str) -> Any:
        if self._numbers is None or name in self._known:
            return self._known[name]
        return getattr(self._numbers.wait(), name)

    @property
    def is_read(self) -> bool:
        return self._numbers is None or self._numbers.is_read

    @property
    def loss(self) -> float:
        loss: float = self._value("loss")
        return loss

    @property
    def grad_norm(self) -> float:
        grad_norm: float = self._value("grad_norm")
        return grad_norm

    @property
    def stop_requested(self) -> bool:
        stop_requested: bool = self._value("stop_requested")
        return stop_requested

    @property
    def data_exhausted(self) -> bool:
        data_exhausted: bool = self._value("data_exhausted")
        return data_exhausted

    @property
    def measures(self) -> Mapping[str, float]:
        measures: Mapping[str, float] = self._value("measures")
        return measures

    @property
    def spike(self) -> str:
        spike: str = self._value("spike")
        return spike

    @property
    def failed(self) -> bool:
        failed: bool = self._value("failed")
        return failed


class ResultsRun(FailingRun, Protocol):
    """A `Trainer` as `DeferredResults` sees it."""

    has_own_update: ClassVar[bool]
    has_data: bool
    converters: list[ModelConverter]

    def read_result(self, loss: Tensor, grad_norm: Tensor, n_tokens: Tensor, /) -> StepResult: ...

    def sum_result(self, loss: Tensor, grad_norm: Tensor, n_tokens: Tensor, /) -> Tensor: ...

    def result_of(self, values: list[float], /) -> StepResult: ...

    def skip_step(self, outcome: StepResult, micro_batches: list[Batch], /) -> None: ...


class DeferredResults:
    """Lets a `Trainer` take steps without waiting for their results, which it gets with the next
    step.

    A result is read in its own step where something other than the optimizer depends on it:
    logging, validation, a checkpoint, the last step, and in every step with the options in
    `_needs_results`.
    """

    device_types: ClassVar[Sequence[str]] = ("cuda",)  # others have nothing to wait for

    def __init__(self, trainer: ResultsRun):
        self._trainer = trainer
        self.pending: DeferredResult | None = None
        """The newest result, if the trainer has not acted on it yet."""
        self._micro_batches: list[Batch] = []
        self._start: StepStart | None = None
        self._action: Callable[[], None] = lambda: None
        self._is_on = trainer.device.type in self.device_types and not _needs_results(trainer)
        self._reads_next = True  # in the first step, and in the last one before a requested stop

    def result(self, micro_batches: list[Batch], *sums: Tensor) -> StepResult:
        """Act on the previous step's result, and return this step's. `sums` are the arguments of
        `Trainer.read_result`."""
        trainer, step = self._trainer, self._trainer.step + 1
        self.settle()
        if not self._is_on or self._is_needed(step):
            return trainer.read_result(*sums)
        values = trainer.sum_result(*sums)
        is_usable = values[1:3].isfinite().all() & (values[RANKS_FAILED] == 0)
        known: dict[str, object] = {
            "step": step,
            "data_step": trainer.run_length.data_step + 1,
            "skip": is_usable.logical_not().float(),
        }
        if trainer.has_data:  # then the data of all ranks has not ended
            known["data_exhausted"] = False
        outcome = DeferredResult(numbers=DeferredNumbers(values, trainer.result_of), **known)
        if not outcome.data_exhausted:
            self.pending = outcome
            self._micro_batches = micro_batches
            self._start = trainer.step_start
            self._action = lambda: None
        return outcome

    def _is_needed(self, step: int) -> bool:
        """Return whether a step needs its result at once, equal on all ranks."""
        reads_next, self._reads_next = self._reads_next, False
        trainer, last = self._trainer, step >= self._trainer.total_steps
        validates = trainer.validator is not None and trainer.validator.is_due(step, last=last)
        saves = trainer.checkpointer.is_due(step, last=last)
        return reads_next or last or validates or saves or trainer.metrics.should_log(step)

    def when_known(self, outcome: StepResult, action: Callable[[], None]) -> None:
        """Call `action`, which needs the numbers of the newest result: at once, or when the trainer
        acts on it."""
        if outcome is self.pending:
            self._action = action
        else:
            action()

    def settle(self) -> None:
        """Act on the newest result, if that is still to be done. Raise what `Trainer.skip_step` or
        `StepFailure.end_run` raises; after the latter, the run is between its step and the one
        before."""
        outcome, self.pending = self.pending, None
        if outcome is None:
            return
        self._reads_next = outcome.stop_requested
        if outcome.failed:
            if self._start is not None:  # its update was skipped
                self._trainer.step_start = self._start.after_skipped_update(self._trainer)
            self._trainer.is_step_complete = False
            self._trainer.step_failure.end_run()
        if not outcome.is_taken:
            self._trainer.skip_step(outcome, self._micro_batches)
        self._action()


def _needs_results(trainer: ResultsRun) -> bool:
    """Return whether each step needs its result, or the optimizer cannot skip an update by
    itself."""
    config = trainer.config
    return (
        config.spikes.threshold is not None
        or config.spikes.action != "stop"
        or not config.spikes.advance_schedule
        or config.ema.decay is not None
        or trainer.loss_scale.is_on
        or any(converter.moves_weights for converter in trainer.converters)
        or config.debug.ledger
        or config.optimizer.early_step_in_backward
        or config.training.enable_cpu_offload
        or trainer.dataloader.adapts
        or trainer.has_own_update
        or not trainer.optimizer.can_skip
    )

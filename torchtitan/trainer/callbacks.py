"""Callbacks, which act around the steps of a run: the base class, and the callbacks of every
run."""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torchtitan.components.data.base import Batch
from torchtitan.components.observe.metric_sinks import JsonLines
from torchtitan.config import Configurable
from torchtitan.config.configurable import builds, config_key
from torchtitan.distributed.compile import RecompileMonitor
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.trainer.run import Run, Sections
from torchtitan.trainer.step_result import StepResult, StopReason


class Callback(Configurable):
    """Base class for actions around the steps of a run, on every rank. Callbacks run in the order
    of `Trainer.Config.callbacks`; options are `--callbacks.<class name in lower case>.<field>`. If
    `Config.has_state` is true, checkpoints contain `state_dict()`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Options of a callback."""

        @property
        def has_state(self) -> bool:
            """True if the callback has state that a resumed run needs."""
            return False

        @builds(lambda: Callback)
        def build(self) -> object:
            """Build the callback of a run."""

        def check_run(self, run: Sections) -> None:
            """Raise `UserError` if the callback does not support a run, a `Trainer.Config`."""

        def is_on(self, run: Run) -> bool:
            """Return whether the callback has work in a run, which is built without it otherwise.
            Equal on all ranks if the callback waits for other ranks."""
            return True

        def evaluates(self, task: str) -> bool:
            """Return whether the callback may report numbers named `evaluation/TASK/…`."""
            return False

    config: Config

    def __init__(self, config: Config, *, trainer: Run):
        super().__init__(config)
        self.trainer = trainer

    def around_run(self) -> AbstractContextManager[object]:
        """Return a context around all steps, entered after loading a checkpoint; it must not
        suppress errors."""
        return contextlib.nullcontext()

    def around_step(self, step: int) -> AbstractContextManager[object]:
        """Return a context around step `step` (from 1), excluding its callbacks and validation."""
        return contextlib.nullcontext()

    def on_batches(self, micro_batches: Sequence[Batch]) -> None:
        """Receive this rank's part of the next global batch, as loaded; empty after the end of the
        data."""

    def on_step(self, outcome: StepResult) -> None:
        """Act on a finished step before it is reported; `trainer.step` already counts it."""

    def on_skip(self, outcome: StepResult) -> None:
        """Act on a step that is not taken: before `on_step`, or on CUDA a step later."""

    def after_step(self, outcome: StepResult) -> None:
        """Act on a finished step after it is reported, before validation and checkpoint."""

    def on_measured(self, numbers: Mapping[str, float]) -> None:
        """Act on the numbers of a validation, or of a task of an evaluation, after step
        `trainer.step`, equal on all ranks: by their names in the metrics, without times."""

    def on_end(self, reason: StopReason) -> None:
        """Act after the last step, before the last validation and checkpoint."""

    def on_return(self, step: int) -> None:
        """Act after the run has loaded the weights of step `step` again, which undid the steps
        since."""

    def state_dict(self) -> dict[str, object]:
        """Return the state that a resumed run needs, JSON-serializable and equal on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the state of a checkpoint. The trainer's step may not be restored yet."""

    def before_save(self) -> None:
        """Sync any files that the checkpoint relies on."""

    def close(self) -> None:
        """Release resources; may be called twice."""


class CallbackStates:
    """States of a run's callbacks in checkpoints, by the names of their options."""

    def __init__(self, callbacks: Callable[[], Sequence[Callback]]):
        self._callbacks = callbacks

    def state_dict(self) -> dict[str, object]:
        return {name: callback.state_dict() for name, callback in self._with_state().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states; a callback that the saved run did not have keeps its own."""
        for name, callback in self._with_state().items():
            if name in state_dict:
                callback.load_state_dict(state_dict[name])

    def _with_state(self) -> dict[str, Callback]:
        return {
            config_key(callback.config): callback
            for callback in self._callbacks()
            if callback.config.has_state
        }


class Recorder(Callback):
    """Base class of callbacks that write JSON lines. A subclass opens `file` on rank 0, and acts on
    errors; checkpoints wait until the lines are on disk."""

    file: JsonLines | None = None
    on_failure: Callable[[OSError], None]

    def use(self, action: Callable[[JsonLines], None]) -> None:
        """Call `action` with the file, if this rank writes it."""
        try:
            if self.file is not None:
                action(self.file)
        except OSError as error:
            self.on_failure(error)

    def before_save(self) -> None:
        self.use(JsonLines.sync)

    def close(self) -> None:
        self.use(JsonLines.close)
        self.file = None


def refuse_scores(run: Sections, option: str) -> None:
    """Raise `UserError` for an option that needs a model which predicts text, in a run that trains
    a reward model."""
    if run.trains_scores:
        raise UserError(
            f"{option} needs a model that predicts text, and a reward model predicts none; use "
            "--validator, which measures rewards/accuracies"
        )


class PeriodicEvaluation(Callback):
    """Base class of callbacks that `evaluate` every `period` steps and after the last one, outside
    of the time that counts as training."""

    is_pending = False
    """True if steps were taken since the last evaluation; a complete run takes none."""

    @property
    def period(self) -> int:
        """Steps between evaluations; 0: never evaluate."""
        raise NotImplementedError

    def evaluate(self) -> None:
        """Evaluate the model of the run. Every rank calls this, since FSDP requires it."""
        raise NotImplementedError

    def after_step(self, outcome: StepResult) -> None:
        period = self.period
        self.is_pending = period > 0 and self.trainer.step % period != 0
        if period and not self.is_pending:
            self._evaluate()

    def on_end(self, reason: StopReason) -> None:
        if self.is_pending and reason != "stopped":
            self._evaluate()

    def _evaluate(self) -> None:
        with self.trainer.metrics.exclude(), self.trainer.phases.during("validation"):
            self.evaluate()


class LineRecorder(Recorder):
    """Append lines to the file `file_name` of the dump folder on rank 0. Resuming from step N drops
    later lines once; a fresh run moves an existing file aside. If the file cannot be written, the
    run continues without it."""

    file_name: ClassVar[str]

    def around_run(self) -> AbstractContextManager[object]:
        if self.trainer.rank == 0:
            path = Path(self.trainer.config.dump_folder) / self.file_name
            self.file = JsonLines(path, self.trainer.step)
        return super().around_run()

    def write(self, lines: Iterable[Mapping[str, object]]) -> None:
        """Append lines, each with its step."""
        for line in lines:
            self.use(partial(JsonLines.append, document=line))

    def on_failure(self, error: OSError) -> None:
        logger.warning(
            "%s cannot be written: %s; the run continues without it", self.file_name, error
        )
        assert self.file is not None
        with contextlib.suppress(OSError):
            self.file.close()
        self.file = None


class GarbageCollection(Callback):
    """Collect garbage only every `training.gc_freq` steps, so that ranks pause together."""

    @contextlib.contextmanager
    def around_run(self) -> Iterator[None]:
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()

    def after_step(self, outcome: StepResult) -> None:
        if self.trainer.step % self.trainer.config.training.gc_freq == 0:
            gc.collect(1)


class RecompileWarning(Callback):
    """Warn if torch.compile compiles after the first step."""

    def __init__(self, config: Callback.Config, *, trainer: Run):
        super().__init__(config, trainer=trainer)
        self.monitor = RecompileMonitor()

    def around_step(self, step: int) -> AbstractContextManager[None]:
        return self.monitor.watch(step)


class Profiling(Callback):
    """Record traces as the section `profiling` says."""

    @dataclass(kw_only=True, slots=True)
    class Config(Callback.Config):
        """Profiling of a run."""

        def is_on(self, run: Run) -> bool:
            return run.config.profiling.is_on

    config: Config

    def __init__(self, config: Callback.Config, *, trainer: Run):
        super().__init__(config, trainer=trainer)
        options = trainer.config.profiling
        self.profiler = options.build(
            dump_folder=trainer.config.dump_folder, device=trainer.device, rank=trainer.rank
        )

    def around_run(self) -> AbstractContextManager[object]:
        profiler: AbstractContextManager[object] = self.profiler
        return profiler

    def after_step(self, outcome: StepResult) -> None:
        self.profiler.step(self.trainer.step)

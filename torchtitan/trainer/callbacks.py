"""Behavior around the steps of a run: the base class, and the callbacks that every run has."""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torchtitan.components.data.base import Batch
from torchtitan.config import Configurable
from torchtitan.distributed.compile import RecompileMonitor
from torchtitan.trainer.outcome import StepOutcome


class Callback(Configurable):
    """Does something around the steps of a run; a subclass overrides the methods for the moments it needs.

    Those in `Trainer.Config.callbacks` are called in that order, on every rank; their options are
    `--callbacks.<class name in lower case>.<field>`.

    Args:
        config: the callback's options.
        trainer: the `Trainer`, fully built but not yet resumed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """A callback."""

    def __init__(self, config: Config, *, trainer: Any):
        super().__init__(config)
        self.trainer = trainer

    def around_run(self) -> AbstractContextManager[Any]:
        """Return a context around all steps, entered once a checkpoint has been loaded."""
        return contextlib.nullcontext()

    def around_step(self, step: int) -> AbstractContextManager[Any]:
        """Return a context for the training step `step`, counted from 1, without what follows it."""
        return contextlib.nullcontext()

    def on_batches(self, micro_batches: Sequence[Batch]) -> None:
        """See this rank's part of the next global batch as the loader gave it; empty behind the end of the data."""

    def on_step(self, outcome: StepOutcome) -> None:
        """Act on a finished step, which `trainer.step` counts, before it is reported."""

    def after_step(self, outcome: StepOutcome) -> None:
        """Act on a finished step after it is reported, before validation and checkpoint."""

    def before_save(self) -> None:
        """Put on disk what a checkpoint counts on."""

    def close(self) -> None:
        """Release what the callback holds; it can be called twice."""


class GarbageCollection(Callback):
    """Collects garbage every `training.gc_freq` steps and never in between, so that ranks pause together."""

    @contextlib.contextmanager
    def around_run(self) -> Iterator[None]:
        """Switch automatic collection off."""
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()

    def after_step(self, outcome: StepOutcome) -> None:
        """Collect the younger generations if it is time."""
        if self.trainer.step % self.trainer.config.training.gc_freq == 0:
            gc.collect(1)


class RecompileWarning(Callback):
    """Warns if torch.compile compiles after the first step."""

    def __init__(self, config: Callback.Config, *, trainer: Any):
        super().__init__(config, trainer=trainer)
        self.monitor = RecompileMonitor()

    def around_step(self, step: int) -> AbstractContextManager[None]:
        """Watch what is compiled."""
        return self.monitor.watch(step)


class Profiling(Callback):
    """Records traces as `profiling` says."""

    def __init__(self, config: Callback.Config, *, trainer: Any):
        super().__init__(config, trainer=trainer)
        options = trainer.config.profiling
        self.profiler = options.build(dump_folder=trainer.config.dump_folder, device=trainer.device, rank=trainer.rank)

    def around_run(self) -> AbstractContextManager[Any]:
        """Record while the run trains."""
        profiler: AbstractContextManager[Any] = self.profiler
        return profiler

    def after_step(self, outcome: StepOutcome) -> None:
        """Write what is due."""
        self.profiler.step(self.trainer.step)

"""Live view of a run on a terminal: a bar below the log, with losses, speed and remaining time."""

import contextlib
import logging
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

from torchtitan.tools.logging import logger
from torchtitan.tools.progress import sparkline
from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.step_result import StepResult

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_N_LOSSES = 24
_SECONDS_BETWEEN_UPDATES = 0.1


class LiveView(Callback):
    """Show a progress bar while rank 0, and no other rank, logs to a terminal (`metrics.enable_live_view`)."""

    def __init__(self, config: Callback.Config, *, trainer: Any):
        super().__init__(config, trainer=trainer)
        self._bar: Progress | None = None
        self._losses = deque[float](maxlen=_N_LOSSES)
        self._durations = deque[float](maxlen=_N_LOSSES)
        self._last_step = self._last_update = 0.0

    @contextlib.contextmanager
    def around_run(self) -> Iterator[None]:
        trainer = self.trainer
        is_alone = trainer.rank == 0 and os.environ.get("LOG_RANK", "0") == "0"
        if not (is_alone and trainer.config.metrics.enable_live_view and sys.stderr.isatty()):
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[state]}"))
        ends = (TextColumn("ETA"), TimeRemainingColumn())
        # Drawn after steps only, without a thread; removed at the end. Output of other code appears above it.
        bar = Progress(
            *(*columns, *ends),
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        with _logging_above(console), bar:
            console.show_cursor(True)  # a killed run could not show it again
            bar.add_task(self._description(), total=trainer.total_steps, completed=trainer.step, state="")
            self._bar, self._last_step = bar, time.perf_counter()
            try:
                yield
            finally:
                self._bar = None

    def on_step(self, outcome: StepResult) -> None:
        now = time.perf_counter()
        self._durations.append(now - self._last_step)
        self._last_step = now
        if math.isfinite(outcome.loss):
            self._losses.append(outcome.loss)
        if self._bar and now - self._last_update > _SECONDS_BETWEEN_UPDATES:
            self._last_update = now
            speed = self.trainer.tokens_per_step / statistics.median(self._durations)
            state = f"{sparkline(self._losses)} loss {outcome.loss:.4f}  {speed:,.0f} tokens/s"
            (task,) = self._bar.task_ids
            self._bar.update(
                task, completed=self.trainer.step, description=self._description(), state=state, refresh=True
            )

    def _description(self) -> str:
        return f"step {self.trainer.step}/{self.trainer.total_steps}"


@contextlib.contextmanager
def _logging_above(console: "Console") -> Iterator[None]:
    """Let the logger write above the live part of the console."""
    handlers = [one for one in logger.handlers if isinstance(one, logging.StreamHandler) and one.stream is sys.stderr]
    streams = [handler.stream for handler in handlers]
    for handler in handlers:
        handler.setStream(cast(TextIO, _Above(console)))
    try:
        yield
    finally:
        for handler, stream in zip(handlers, streams, strict=True):
            handler.setStream(stream)


class _Above:
    """A stream that prints whole lines on a console, and leaves long ones to the terminal."""

    def __init__(self, console: "Console"):
        self._console = console

    def write(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True)

    def flush(self) -> None:
        self._console.file.flush()

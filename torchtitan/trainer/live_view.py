"""Live view of a run on a terminal: a bar below the log, with losses, speed and remaining time."""

import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchtitan.tools.logging import logger
from torchtitan.tools.progress import sparkline
from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.step_result import StepResult

if TYPE_CHECKING:
    from rich.progress import Progress

_SECONDS_BETWEEN_UPDATES = 0.1


class LiveView(Callback):
    """Show a progress bar while rank 0, and no other rank, logs to a terminal (`metrics.enable_live_view`)."""

    def __init__(self, config: Callback.Config, *, trainer: Any):
        super().__init__(config, trainer=trainer)
        self._bar: Progress | None = None
        self._losses = deque[float](maxlen=24)
        self._last_update = 0.0

    @contextlib.contextmanager
    def around_run(self) -> Iterator[None]:
        is_alone = self.trainer.rank == 0 and os.environ.get("LOG_RANK", "0") == "0"
        if not (is_alone and self.trainer.config.metrics.enable_live_view and sys.stderr.isatty()):
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        terminal = sys.stderr
        console = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[state]}  ETA"))
        # Drawn after steps only, without a thread; removed at the end. Output of other code appears above it.
        options: dict[str, Any] = {"auto_refresh": False, "transient": True, "redirect_stdout": sys.stdout.isatty()}
        with (
            Progress(*columns, TimeRemainingColumn(), console=console, **options) as bar,
            contextlib.ExitStack() as stack,
        ):
            for handler in logger.handlers:  # standard error is now redirected to appear above the bar
                if isinstance(handler, logging.StreamHandler) and handler.stream is terminal:
                    stack.callback(handler.setStream, handler.setStream(sys.stderr))
            console.show_cursor(True)  # a killed run could not show it again
            bar.add_task("", total=self.trainer.total_steps, completed=self.trainer.step, state="")
            self._bar = bar
            yield

    def on_step(self, outcome: StepResult) -> None:
        now = time.perf_counter()
        self._losses += [outcome.loss] if outcome.is_finite else []
        if self._bar and now - self._last_update > _SECONDS_BETWEEN_UPDATES:
            self._last_update, step, total = now, self.trainer.step, self.trainer.total_steps
            (task,) = self._bar.tasks
            speed = (task.speed or 0) * self.trainer.tokens_per_step  # of steps before this one
            state = f"{sparkline(self._losses)} loss {outcome.loss:.4f}  {speed:,.0f} tokens/s"
            self._bar.update(task.id, completed=step, description=f"step {step}/{total}", state=state, refresh=True)

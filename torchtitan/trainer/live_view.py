"""Live view of a run on a terminal: a bar below the log, with losses, speed and remaining time."""

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchtitan.components.observe.metrics import SHOWN_PARTS
from torchtitan.tools.progress import progress, sparkline
from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.run import Run
from torchtitan.trainer.step_result import StepResult


class LiveView(Callback):
    """Show a progress bar while rank 0, and no other rank, logs to a terminal
    (`metrics.enable_live_view`)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Callback.Config):
        """The progress bar of a run."""

        def is_on(self, run: Run) -> bool:
            is_alone = run.rank == 0 and os.environ.get("LOG_RANK", "0") == "0"
            return is_alone and run.config.metrics.enable_live_view and sys.stderr.isatty()

    config: Config
    _advance: Callable[..., None] | None = None

    @contextlib.contextmanager
    def around_run(self) -> Iterator[None]:
        # time, tokens seen, result of the last steps
        self._recent = deque[tuple[float, int, StepResult]](maxlen=12)
        with progress("", self.trainer.total_steps, done=self.trainer.step) as self._advance:
            yield

    def on_step(self, outcome: StepResult) -> None:
        if not self._advance:
            return
        step = self.trainer.step
        total = self.trainer.total_steps
        seen = self.trainer.n_tokens_seen
        self._recent.append((time.perf_counter(), seen, outcome))
        seconds, n_tokens = self._recent[-1][0] - self._recent[0][0], seen - self._recent[0][1]
        # the newest may still be on the device
        known = [each for *_, each in self._recent if each.is_read]
        curve = sparkline(each.loss for each in known if math.isfinite(each.loss))
        # of the steps after the first one shown
        speed = f"  {n_tokens / seconds:,.0f} {self.trainer.metrics.unit}/s" if seconds else ""
        parts = [f"step {step}/{total} {curve} loss {known[-1].loss:.4f}"]
        parts += [
            f"{SHOWN_PARTS[name]} {x:.4g}"
            for name, x in known[-1].measures.items()
            if name in SHOWN_PARTS
        ]
        self._advance(1, "  ".join(parts) + speed)

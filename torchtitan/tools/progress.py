"""Progress bar on a terminal, log lines elsewhere; numbers as a line of bars."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torchtitan.tools.logging import logger

SECONDS_BETWEEN_LINES = 10.0

_BARS = "▁▂▃▄▅▆▇█"


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress towards `total` during the block; yields a function to call with each additional amount."""
    if not sys.stderr.isatty():
        yield _Lines(title, total).advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.advance(task, amount)


class _Lines:
    """Logs the progress every few seconds."""

    def __init__(self, title: str, total: int):
        self.title = title
        self.total = total
        self.done = 0
        self.last = time.monotonic()

    def advance(self, amount: int) -> None:
        self.done += amount
        if time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            logger.info(f"{self.title}: {100 * self.done / max(1, self.total):.0f}%")


def sparkline(numbers: Iterable[float], width: int = 60) -> str:
    """Return the values as a line of bars, the means of equal parts if there are more than `width`."""
    values = list(numbers)
    n_parts = min(width, len(values))
    parts = [values[i * len(values) // n_parts : (i + 1) * len(values) // n_parts] for i in range(n_parts)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)

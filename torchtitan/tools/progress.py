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
        done, last = 0, time.monotonic()

        def advance(amount: int) -> None:
            nonlocal done, last
            done += amount
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                logger.info(f"{title}: {100 * done / max(1, total):.0f}%")

        yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.advance(task, amount)


def sparkline(numbers: Iterable[float], width: int = 60) -> str:
    """Return the values as a line of bars, the means of equal parts if there are more than `width`."""
    values = list(numbers)
    n_parts = min(width, len(values))
    parts = [values[i * len(values) // n_parts : (i + 1) * len(values) // n_parts] for i in range(n_parts)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)

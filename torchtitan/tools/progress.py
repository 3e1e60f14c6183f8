"""Progress bar on a terminal, log lines elsewhere; numbers as a line of bars."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torchtitan.tools.logging import logger, presentable

SECONDS_BETWEEN_BARS, SECONDS_BETWEEN_LINES = 0.1, 10.0
_BARS = "▁▂▃▄▅▆▇█"


@contextmanager
def progress(title: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
    """Show progress from `done` to `total` during the block: as a bar below other output if
    standard error is a terminal, drawn in calls only, without a thread, and removed at the end;
    else as log lines. Yields a function to call with each additional amount, and the title if it
    changes."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    has_bar, last = sys.stderr.isatty(), time.monotonic()
    console = Console(
        stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True, quiet=not has_bar
    )
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(8),
        TaskProgressColumn(),
        "ETA",
    )
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        disable=not has_bar,
        auto_refresh=False,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    ) as bar:
        console.show_cursor(True)  # a killed process could not show it again
        task = bar.add_task(presentable(title), total=total, completed=done)

        def advance(amount: int, title: str = title) -> None:
            nonlocal done, last
            done += amount
            if time.monotonic() - last < (
                SECONDS_BETWEEN_BARS if has_bar else SECONDS_BETWEEN_LINES
            ):
                return
            last = time.monotonic()
            if has_bar:
                bar.update(task, completed=done, description=presentable(title), refresh=True)
            else:
                logger.info(f"{title}: {100 * done / max(1, total):.0f}%")

        yield advance


def sparkline(numbers: Iterable[float], width: int = 60) -> str:
    """Return the values as a line of bars, the means of equal parts if there are more than
    `width`."""
    values = list(numbers)
    n_parts = min(width, len(values))
    parts = [
        values[i * len(values) // n_parts : (i + 1) * len(values) // n_parts]
        for i in range(n_parts)
    ]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(
        _BARS[round((mean - low) / (high - low or 1.0) * (len(_BARS) - 1))] for mean in means
    )

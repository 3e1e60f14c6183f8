"""Tables on standard output."""

import sys
from collections.abc import Container, Iterable, Sequence

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table

from torchtitan.tools.logging import presentable


def open_console(file_width: int = 200) -> Console:
    """Return a console on standard output that treats text from files neither as markup nor as
    emoji. Its lines have up to `file_width` characters if standard output is not a terminal."""
    return Console(
        width=None if sys.stdout.isatty() else file_width,
        markup=False,
        emoji=False,
        highlight=False,
    )


def print_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Container[str] = (),
    *,
    has_lines: bool = True,
) -> None:
    """Print a table, with lines between its cells; the columns `numbers` are aligned on the
    right."""
    box = HEAVY_HEAD if has_lines else None
    table = Table(
        title=presentable(title),
        title_justify="left",
        title_style="bold",
        min_width=len(title),
        box=box,
    )
    for column in columns:
        table.add_column(
            presentable(column), justify="right" if column in numbers else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(presentable(cell) for cell in row))
    console.print(table)

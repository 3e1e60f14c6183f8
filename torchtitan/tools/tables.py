"""Tables on standard output."""

import sys
from collections.abc import Container, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from torchtitan.tools.logging import visible

_FILE_WIDTH = 200


def open_console() -> Console:
    """Return a console on standard output that treats text from files neither as markup nor as emoji."""
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False)


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Container[str] = ()
) -> None:
    """Print a table; the columns `numbers` are aligned on the right."""
    table = Table(title=title, title_justify="left", title_style="bold", min_width=len(title))
    for column in columns:
        table.add_column(visible(column), justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(visible, row))
    console.print(table)

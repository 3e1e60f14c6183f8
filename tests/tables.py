"""Tables of the tools in this folder, for the terminal and the documentation."""

import argparse
import datetime
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table


class Row(NamedTuple):
    """A row's text by column, and whether it is shown as a failure."""

    cells: Sequence[str]
    failed: bool = False


def markers(name: str) -> tuple[str, str]:
    """Return the lines of a page before and after the table `name`."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def print_table(title: str, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Print the table on the terminal."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row.cells, style="red" if row.failed else None)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def as_markdown(columns: Sequence[str], rows: Iterable[Row], *, counts: bool = False) -> str:
    """Return the table for the documentation; with `counts`, all columns but the first are aligned
    to the right."""
    ruler = ["---", *["---:" if counts else "---"] * (len(columns) - 1)]
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join(ruler)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row.cells)} |" for row in rows)])


def stored_rows(page: Path, name: str) -> dict[str, tuple[str, ...]]:
    """Return the first cell → all cells of each line of the table `name` on a page."""
    begin, end = markers(name)
    text = page.read_text().partition(begin)[2].partition(end)[0]
    lines = [
        tuple(re.split(r" ?\| ?", line)[1:-1])
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return {line[0]: line for line in lines}


def write_docs(page: Path, name: str, text: str) -> None:
    """Put `text` between the markers of `name` in a page, which has both."""
    begin, end = markers(name)
    before, found_begin, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    assert found_begin and found_end, f"{page} lacks the markers {begin} and {end}"
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def describe(tool: str, arguments: argparse.Namespace, *options: str) -> str:
    """Describe the command, date and machine of a table; `options` are named if they have a
    value."""
    values = {option: getattr(arguments, option) for option in options}
    words = [
        word
        for option, value in values.items()
        if value not in (None, "")
        for word in (f"--{option}", value.name if isinstance(value, Path) else str(value))
    ]
    machine = (
        f"{platform.system()}, {platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}"
    )
    return f"`{shlex.join(['python', '-m', tool, *words])}`, {datetime.date.today()}, {machine}:"

"""A data inspection on the terminal."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from torchtitan.cli.data_samples import Document, Row, Sample
from torchtitan.cli.data_tables import (
    Inspection,
    Table,
    counts_of,
    counts_of_documents,
    events_table,
    histogram,
    sets_table,
    share_beyond,
)
from torchtitan.components.data.report import SetSummary
from torchtitan.tools.terminal import visible

_WIDTH_OF_A_FILE = 140
_WIDTH_OF_BARS = 40
_TRAINED, _SPECIAL, _QUIET = "bold green", "reverse", "dim"
_MARKS = ("⟦", "⟧")
"""Around what is trained, where there are no colours."""


def open_console() -> Console:
    """Standard output. What comes from the data is neither markup nor emoji there."""
    width = None if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    return Console(width=width, markup=False, emoji=False, highlight=False)


def print_inspection(console: Console, inspection: Inspection) -> None:
    """Tables first, then the samples."""
    console.print(Text(visible(inspection.title), style="bold"))
    _print_facts(console, inspection.facts)
    if summary := inspection.summary:
        for table in (sets_table(summary.sets), events_table(summary.sets)):
            if table.rows:
                console.print(_table(table))
        for of_set in summary.sets:
            _print_histogram(console, of_set, summary.max_length)
    print_samples(console, inspection.samples)
    if inspection.refusal:
        console.print(
            Text(visible(f"Training would be refused: {inspection.refusal}"), style="bold red"), soft_wrap=True
        )


def print_samples(console: Console, samples: Sequence[Sample], *, in_windows: bool = True) -> None:
    """The samples' documents, with what is trained coloured, or else marked.

    Args:
        console: see `open_console`.
        samples: what to print.
        in_windows: whether they are windows that are trained on; otherwise each is a document by itself, and padding
            means nothing.
    """
    if not in_windows:
        samples = [replace(sample, rows=[row._replace(n_padding=0) for row in sample.rows]) for sample in samples]
    left, right = _MARKS
    key = Text("trained", style=_TRAINED) if _has_colors(console) else Text(f"{left}trained{right}")
    console.print(
        Text.assemble(
            "\nWindows: " if in_windows else "\nDocuments: ",
            key,
            " tokens, ",
            ("special", _SPECIAL),
            " tokens, the others not trained",
        )
    )
    _print_facts(console, counts_of(samples) if in_windows else counts_of_documents(samples))
    for number, sample in enumerate(samples, start=1):
        console.print()
        console.rule(Text(f"{number}"), style=_QUIET)
        if len(sample.rows) > 1:
            _print_side_by_side(console, sample)
        else:
            console.print(_row_text(sample.rows[0], sample.name, colored=_has_colors(console)), soft_wrap=True)
        if sample.answer is not None:
            console.print(Text.assemble(("reference answer: ", _QUIET), visible(sample.answer)), soft_wrap=True)


def _has_colors(console: Console) -> bool:
    return console.is_terminal and console.color_system is not None and not console.no_color


def _print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    for name, value in facts:
        console.print(Text.assemble(f"  {name:<20}", visible(value)), soft_wrap=True)


def _table(table: Table) -> RichTable:
    words = ("data set", "format", "what", "for example")
    shown = RichTable(title=table.title, title_justify="left", title_style="bold")
    for column in table.columns:
        shown.add_column(column, justify="left" if column in words else "right", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(visible, row))
    return shown


def _print_histogram(console: Console, of_set: SetSummary, max_length: int) -> None:
    beyond = share_beyond(of_set.lengths, max_length)
    title = f"\nTokens per sample of {visible(of_set.name)}: {beyond:.1%} have more than a window's {max_length:,}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    bins = histogram(of_set.lengths, max_length)
    most = max(of_bin.n_samples for of_bin in bins)
    for of_bin in bins:
        bar = "█" * round(_WIDTH_OF_BARS * of_bin.n_samples / most)
        style = "red" if of_bin.beyond else "green"
        console.print(Text.assemble(f"  {of_bin.label:>20} {of_bin.n_samples:>9,} ", (bar, style)))


def _print_side_by_side(console: Console, sample: Sample) -> None:
    grid = RichTable(expand=True)
    for row in sample.rows:
        grid.add_column(row.title, ratio=1, overflow="fold")
    grid.add_row(*(_row_text(row, sample.name, colored=_has_colors(console)) for row in sample.rows))
    console.print(grid)


def _row_text(row: Row, sample_name: str, *, colored: bool) -> Text:
    named_alone = any(document.name for document in row.documents)
    text = Text() if named_alone else Text(f"{visible(sample_name)}\n", style=_QUIET)
    for number, document in enumerate(row.documents):
        if number or document.name:
            text.append(f"── {visible(document.name)}\n", style=_QUIET)
        text.append_text(_document_text(document, colored=colored)).append("\n")
    if row.n_padding:
        text.append(f"── {row.n_padding:,} positions of padding\n", style=_QUIET)
    return text


def _document_text(document: Document, *, colored: bool) -> Text:
    text = Text()
    for trained, stretch in groupby(document.tokens, key=lambda token: token.trained):
        if not colored:
            content = "".join(token.text for token in stretch)
            text.append(f"{_MARKS[0]}{content}{_MARKS[1]}" if trained else content)
            continue
        for special, same in groupby(stretch, key=lambda token: token.special):
            styles = [_TRAINED] * trained + [_SPECIAL] * special
            text.append("".join(token.text for token in same), style=" ".join(styles))
    return text

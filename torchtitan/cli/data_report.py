"""A data inspection on the terminal, and as a self-contained HTML page without scripts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchtitan.cli.data_samples import Document, Row, Sample
from torchtitan.cli.pages import render
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.report import BEFORE_THE_LIMIT, DataSummary, Report, SetSummary
from torchtitan.tools.logging import presentable
from torchtitan.tools.tables import print_table


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Contents of a report."""

    title: str
    facts: list[tuple[str, str]]
    summary: DataSummary | None
    """None if the loader reports no summary."""
    samples: list[Sample]
    refusal: str = ""
    """Error that training would raise; empty if none."""


_TURN_WORDS = ("document", "the prompt ends with", "the model writes", "options of the template")

_SHOWN_CHARACTERS = 60
"""Characters of a prompt's end in the table of turns."""

_Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


class Bin(NamedTuple):
    """Samples of `low` to `high` tokens, both inclusive."""

    low: int
    high: int
    n_samples: int
    beyond: bool

    @property
    def label(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}-{self.high:,}"


# Tables, shared by the terminal and the page.


def _tables(summary: DataSummary) -> Iterator[_Table]:
    counts = ("rows", "kept", "cut", "dropped", "tokens", "trained")
    columns = ("dataset", "format", *counts, "% trained", "times read", "at most", "% of the run")
    n_read = sum(_tokens_read(data) for data in summary.sets)
    yield "Datasets", columns, [_set_cells(data, n_read) for data in summary.sets]
    if summary.sources:
        yield (
            "Sources",
            ("source", *counts, "% trained"),
            [[name, *_count_cells(report)] for name, report in summary.sources],
        )
    reports = _reports(summary)
    if events := [cells for name, report in reports for cells in _event_rows(name, report)]:
        yield (
            "Rows and samples that were dropped or changed",
            ("dataset", "what", "rows", "for example"),
            events,
        )


def _reports(summary: DataSummary) -> Sequence[tuple[str, Report]]:
    return summary.sources or [(data.name, data.report) for data in summary.sets]


def _tokens_read(data: SetSummary) -> float:
    return data.report.tokens * data.epochs


def _set_cells(data: SetSummary, n_read: float) -> list[str]:
    """Return the cells of a dataset in a run that reads `n_read` tokens of all datasets."""
    report = data.report
    limit = "no limit" if data.max_epochs is None else f"{data.max_epochs:g}"
    times = f"{data.epochs:.2f}" if data.epochs >= 1 else f"{data.epochs:.2g}"
    share = f"{_tokens_read(data) / n_read:.1%}" if n_read else "-"
    return [data.name, report.format, *_count_cells(report), times, limit, share]


def _count_cells(report: Report) -> list[str]:
    counts = (
        report.rows,
        report.kept,
        report.truncated.count,
        report.n_dropped,
        report.tokens,
        report.trained_tokens,
    )
    share = f"{report.trained_tokens / report.tokens:.1%}" if report.tokens else "-"
    return [*(f"{count:,}" for count in counts), share]


def _event_rows(name: str, report: Report) -> Iterator[list[str]]:
    for event, counter in report.events():
        if counter.count:
            event = event.replace("dropped, ", "dropped: ")
            yield [name, event, f"{counter.count:,}", "\n".join(counter.in_words())]


def _turn_tables(
    reports: Sequence[tuple[str, Report]], samples: Sequence[Sample]
) -> Iterator[_Table]:
    """Yield the counts of trained turns, and the samples' turns next to the end of their prompts at
    inference."""
    counted = [(name, report) for name, report in reports if report.turns]
    if counted:
        columns = (
            "dataset",
            "trained turns",
            "teach a stop",
            "only a stop",
            "options of the template",
        )
        is_limited = any(report.are_turns_limited for _, report in counted)
        title = f"Trained turns{f', {BEFORE_THE_LIMIT}' if is_limited else ''}"
        yield title, columns, [_turn_cells(name, report) for name, report in counted]
    respelled: list[list[str]] = []
    for name, report in reports:
        respelled += _normal_rows(name, report)
    if respelled:
        headings = ("dataset", "rows in another spelling", "row", "normal form")
        yield "Messages as they are read", headings, respelled
    shown: list[list[str]] = []
    for sample in samples:
        for row in sample.rows:
            for document in row.documents:
                shown += _turns(document)
    if counted and shown:
        yield (
            "Turns in the windows below",
            ("document", "the prompt ends with", "the model writes"),
            shown,
        )


def _normal_rows(name: str, report: Report) -> Iterator[list[str]]:
    for where, messages in report.normal.examples:
        yield [name, f"{report.normal.count:,}", where, _shortened(messages, 8 * _SHOWN_CHARACTERS)]


def _turn_cells(name: str, report: Report) -> list[str]:
    options = ", ".join(f"{option}: {count:,}" for option, count in report.options.items())
    counts = (report.turns, report.stops, report.only_stops.count)
    return [name, *(f"{count:,}" for count in counts), options or "none"]


def _turns(document: Document) -> Iterator[list[str]]:
    """Yield the trained pieces of a document, each with the text before it."""
    before = ""
    for trained, tokens in groupby(document.tokens, key=lambda token: token.trained):
        text = "".join(token.text for token in tokens)
        if trained:
            yield [document.name, before[-_SHOWN_CHARACTERS:], _shortened(text)]
        before += text


def _shortened(text: str, half: int = 2 * _SHOWN_CHARACTERS) -> str:
    return text if len(text) <= 2 * half else f"{text[:half]} … {text[-half:]}"


def histogram(lengths: Array, max_length: int) -> list[Bin]:
    """Return the number of samples per length. Bins begin at powers of two, and one begins above
    `max_length`.

    Args:
        lengths: tokens of each sample, shape (n,), n > 0.
        max_length: maximum tokens in a sample.
    """
    longest = int(lengths.max())
    edges = sorted(
        {0, *(1 << exponent for exponent in range(longest.bit_length() + 1)), max_length + 1}
    )
    counts, _ = np.histogram(lengths, [*edges, max(longest, edges[-1]) + 1])
    bins = [
        Bin(low, high - 1, int(count), low > max_length)
        for low, high, count in zip(edges, [*edges[1:], edges[-1] * 2], counts, strict=True)
    ]
    filled = [index for index, length_bin in enumerate(bins) if length_bin.n_samples]
    return bins[filled[0] : filled[-1] + 1]


def _fraction_beyond(data: SetSummary, max_length: int) -> float:
    return float((data.lengths > max_length).mean())


def _counts_of(samples: Sequence[Sample], *, in_windows: bool = True) -> list[tuple[str, str]]:
    rows = [row for sample in samples for row in sample.rows]
    documents = [document for row in rows for document in row.documents]
    n_tokens = sum(token.n_tokens for document in documents for token in document.tokens)
    n_trained = sum(token.trained for document in documents for token in document.tokens)
    share = f" ({n_trained / n_tokens:.1%})" if n_tokens else ""
    counts = [
        ("documents", f"{len(documents):,}"),
        ("tokens", f"{n_tokens:,}"),
        ("trained", f"{n_trained:,}{share}"),
    ]
    pictures = [token.picture for document in documents for token in document.tokens]
    if sizes := [picture.n_tokens for picture in pictures if picture]:
        counts.append(("images", f"{len(sizes):,}, with {sum(sizes):,} tokens"))
    if not in_windows:
        return counts
    n_positions = sum(row.n_positions for row in rows)
    n_padding = sum(row.n_padding for row in rows)
    return [
        ("windows", f"{len(samples):,}"),
        *counts,
        ("padding", f"{n_padding:,} of {n_positions:,} positions"),
    ]


# The terminal.

_BAR_WIDTH = 40
_TRAINED = "bold green"
_SPECIAL = "reverse"
_QUIET = "dim"
_MARKS = ("⟦", "⟧")
"""Marks around trained text without colors."""


def print_inspection(console: Console, inspection: Inspection) -> None:
    """Print the tables, then the samples."""
    console.print(Text(presentable(inspection.title), style="bold"))
    _print_facts(console, inspection.facts)
    if summary := inspection.summary:
        words = ("dataset", "source", "format", "what", "for example")
        for title, columns, rows in _tables(summary):
            print_table(console, title, columns, rows, numbers=set(columns) - {*words})
        for data in summary.sets:
            _print_histogram(console, data, summary.max_length)
        for title, columns, rows in _turn_tables(_reports(summary), inspection.samples):
            print_table(
                console, title, columns, rows, numbers=set(columns) - {*words, *_TURN_WORDS}
            )
    print_samples(console, inspection.samples)
    if inspection.refusal:
        refusal = f"Training would fail: {inspection.refusal}"
        console.print(Text(presentable(refusal), style="bold red"), soft_wrap=True)


def print_samples(console: Console, samples: Sequence[Sample], *, in_windows: bool = True) -> None:
    """Print the samples' documents, with trained tokens colored or marked.

    Args:
        in_windows: whether samples are training windows; otherwise each is a single document, and
            padding is ignored.
    """
    if not in_windows:
        samples = [
            replace(sample, rows=[row._replace(n_padding=0) for row in sample.rows])
            for sample in samples
        ]
    colored = console.is_terminal and console.color_system is not None and not console.no_color
    key = Text("trained", style=_TRAINED) if colored else Text("trained".join(_MARKS))
    title = "\nWindows: " if in_windows else "\nDocuments: "
    console.print(
        Text.assemble(
            title, key, " tokens, ", ("special", _SPECIAL), " tokens, the others not trained"
        )
    )
    _print_facts(console, _counts_of(samples, in_windows=in_windows))
    for number, sample in enumerate(samples, start=1):
        console.print()
        console.rule(Text(f"{number}"), style=_QUIET)
        texts = [_row_text(row, sample.name, colored=colored) for row in sample.rows]
        if len(texts) > 1:
            side_by_side = Table(expand=True)
            for row in sample.rows:
                side_by_side.add_column(row.title, ratio=1, overflow="fold")
            side_by_side.add_row(*texts)
            console.print(side_by_side)
        else:
            console.print(texts[0], soft_wrap=True)
        if sample.answer is not None:
            console.print(
                Text.assemble(("reference answer: ", _QUIET), sample.answer),
                soft_wrap=True,
            )


def _print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    for name, value in facts:
        console.print(Text.assemble(f"  {name:<20}", presentable(value)), soft_wrap=True)


def _print_histogram(console: Console, data: SetSummary, max_length: int) -> None:
    beyond = _fraction_beyond(data, max_length)
    title = (
        f"\nTokens per sample of {presentable(data.name)}: {beyond:.1%} have more than a window's "
        f"{max_length:,}"
    )
    console.print(Text(title, style="bold"), soft_wrap=True)
    bins = histogram(data.lengths, max_length)
    most = max(length_bin.n_samples for length_bin in bins)
    for length_bin in bins:
        bar = "█" * round(_BAR_WIDTH * length_bin.n_samples / most)
        style = "red" if length_bin.beyond else "green"
        console.print(
            Text.assemble(f"  {length_bin.label:>20} {length_bin.n_samples:>9,} ", (bar, style))
        )


def _row_text(row: Row, sample_name: str, *, colored: bool) -> Text:
    named_alone = any(document.name for document in row.documents)
    text = Text() if named_alone else Text(f"{presentable(sample_name)}\n", style=_QUIET)
    for number, document in enumerate(row.documents):
        if number or document.name:
            text.append(f"── {presentable(document.name)}\n", style=_QUIET)
        text.append_text(_document_text(document, colored=colored)).append("\n")
    if row.n_padding:
        text.append(f"── {row.n_padding:,} positions of padding\n", style=_QUIET)
    return text


def _document_text(document: Document, *, colored: bool) -> Text:
    text = Text()
    for trained, stretch in groupby(document.tokens, key=lambda token: token.trained):
        if not colored:
            content = "".join(token.text for token in stretch)
            text.append(content.join(_MARKS) if trained else content)
            continue
        for special, same in groupby(stretch, key=lambda token: token.special):
            styles = []
            if trained:
                styles.append(_TRAINED)
            if special:
                styles.append(_SPECIAL)
            text.append("".join(token.text for token in same), style=" ".join(styles))
    return text


def page(inspection: Inspection) -> str:
    """Return a whole HTML file."""
    summary = inspection.summary
    sets, limit = (summary.sets, summary.max_length) if summary else ([], 0)
    return render(
        "data_report.html",
        title=inspection.title,
        refusal=inspection.refusal,
        facts=inspection.facts,
        tables=[*_tables(summary), *_turn_tables(_reports(summary), inspection.samples)]
        if summary
        else [],
        max_length=limit,
        histograms=[
            (data.name, _fraction_beyond(data, limit), histogram(data.lengths, limit))
            for data in sets
        ],
        counts=_counts_of(inspection.samples),
        samples=inspection.samples,
    )

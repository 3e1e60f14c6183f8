"""The numbers of a data inspection as cells of tables, for the terminal and for the page alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchtitan.cli.data_samples import Sample
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.report import DataSummary, SetSummary


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """All that is shown."""

    title: str
    facts: list[tuple[str, str]]
    """Of the run, by name."""
    summary: DataSummary | None
    """None: the loader tells none."""
    samples: list[Sample]
    refusal: str = ""
    """Why a training run would be refused; empty: it would not."""


class Table(NamedTuple):
    """Cells of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Bin(NamedTuple):
    """Samples of `low` to `high` tokens, both included."""

    low: int
    high: int
    n_samples: int
    beyond: bool
    """Whether they are longer than a sample may be."""

    @property
    def label(self) -> str:
        """The range in words."""
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}-{self.high:,}"


def sets_table(sets: Sequence[SetSummary]) -> Table:
    """Each data set in a line."""
    columns = (
        "data set",
        "format",
        "rows",
        "kept",
        "cut",
        "dropped",
        "tokens",
        "trained",
        "share",
        "times read",
        "at most",
    )
    return Table("Data sets", columns, [_set_cells(of_set) for of_set in sets])


def _set_cells(of_set: SetSummary) -> list[str]:
    report = of_set.report
    counts = (report.rows, report.kept, report.truncated.count, report.n_dropped, report.tokens, report.trained_tokens)
    share = f"{report.trained_tokens / report.tokens:.1%}" if report.tokens else "-"
    limit = "no limit" if of_set.max_epochs is None else f"{of_set.max_epochs:g}"
    return [of_set.name, report.format, *(f"{count:,}" for count in counts), share, f"{of_set.epochs:.2f}", limit]


def events_table(sets: Sequence[SetSummary]) -> Table:
    """What happened to some rows, with examples; no lines where nothing did."""
    rows = []
    for of_set in sets:
        report = of_set.report
        events = {f"dropped: {reason}": tally for reason, tally in report.dropped.items()}
        events |= {"cut": report.truncated, "spells special tokens": report.spelt}
        for event, tally in events.items():
            if tally.count:
                rows.append([of_set.name, event, f"{tally.count:,}", "\n".join(tally.in_words())])
        if report.unread:
            rows.append([of_set.name, "columns not read", "", ", ".join(report.unread)])
    return Table("Rows left out, cut or remarkable", ("data set", "what", "rows", "for example"), rows)


def histogram(lengths: Array, max_length: int) -> list[Bin]:
    """How many samples have how many tokens: bins that begin at powers of two, and one that begins above `max_length`.

    Args:
        lengths: tokens of each sample (n,), n > 0.
        max_length: most tokens that a sample may have.
    """
    longest = int(lengths.max())
    powers = [1 << exponent for exponent in range(longest.bit_length() + 1)]
    edges = sorted({0, *powers, max_length + 1})
    counts, _ = np.histogram(lengths, [*edges, max(longest, edges[-1]) + 1])
    bins = [
        Bin(low, high - 1, int(count), low > max_length)
        for low, high, count in zip(edges, [*edges[1:], edges[-1] * 2], counts, strict=True)
    ]
    filled = [index for index, of_bin in enumerate(bins) if of_bin.n_samples]
    return bins[filled[0] : filled[-1] + 1]


def share_beyond(lengths: Array, max_length: int) -> float:
    """The share of the samples that are too long."""
    return float((lengths > max_length).mean())


def counts_of(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """What the shown samples hold, by name."""
    rows = [row for sample in samples for row in sample.rows]
    n_positions, n_padding = sum(row.n_positions for row in rows), sum(row.n_padding for row in rows)
    return [
        ("windows", f"{len(samples):,}"),
        *counts_of_documents(samples),
        ("padding", f"{n_padding:,} of {n_positions:,} positions"),
    ]


def counts_of_documents(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """What the documents of the shown samples hold, by name."""
    documents = [document for sample in samples for row in sample.rows for document in row.documents]
    n_tokens = sum(len(document.tokens) for document in documents)
    n_trained = sum(token.trained for document in documents for token in document.tokens)
    share = f" ({n_trained / n_tokens:.1%})" if n_tokens else ""
    return [
        ("documents", f"{len(documents):,}"),
        ("tokens", f"{n_tokens:,}"),
        ("trained", f"{n_trained:,}{share}"),
    ]

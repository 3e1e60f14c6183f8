"""Reports on the rows of data sets, and a summary of a loader's data before training."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from torchtitan.components.data.plan.sampler import Array
from torchtitan.tools.errors import UserError

N_EXAMPLES = 3
"""Examples that a `ExampleCounter` keeps."""


@dataclass(slots=True)
class ExampleCounter:
    """Number of samples that something happened to, with the first few as examples."""

    count: int = 0
    examples: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of a sample's location and what happened."""

    def add(self, where: str, what: str) -> None:
        self.count += 1
        if len(self.examples) < N_EXAMPLES:
            self.examples.append((where, what))

    def in_words(self) -> Iterator[str]:
        """Yield the examples, grouped by what happened: `a.jsonl:1, a.jsonl:7: no text`."""
        places: dict[str, list[str]] = {}
        for where, what in self.examples:
            places.setdefault(what, []).append(where)
        return (f"{', '.join(where)}: {what}" for what, where in places.items())


@dataclass(slots=True)
class Report:
    """Counts of a data set's rows, by what happened to them."""

    format: str = ""
    rows: int = 0
    kept: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    """Tokens among them that are predicted."""
    truncated: ExampleCounter = field(default_factory=ExampleCounter)
    special_in_text: ExampleCounter = field(default_factory=ExampleCounter)
    """Samples with text that spells special tokens, which are encoded as special tokens."""
    dropped: dict[str, ExampleCounter] = field(default_factory=dict)
    """Dropped rows by reason, the option that decides."""
    unread: list[str] = field(default_factory=list)
    """Columns that are not read although their names suggest that they matter."""

    @property
    def n_dropped(self) -> int:
        return sum(tally.count for tally in self.dropped.values())

    def drop(self, where: str, reason: str, why: str) -> None:
        self.dropped.setdefault(reason, ExampleCounter()).add(where, why)

    def to_dict(self) -> dict[str, Any]:
        """Return the report, JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Self:
        """Return the report that `to_dict` described."""

        def tally(of: dict[str, Any]) -> ExampleCounter:
            return ExampleCounter(of["count"], [(where, what) for where, what in of["examples"]])

        tallies = {name: tally(document[name]) for name in ("truncated", "special_in_text")}
        dropped = {reason: tally(of) for reason, of in document["dropped"].items()}
        return cls(**{**document, **tallies, "dropped": dropped})

    def lines(self) -> Iterator[str]:
        """Yield the totals, then what happened to some samples, with examples."""
        share = f" ({self.trained_tokens / self.tokens:.0%})" if self.tokens else ""
        yield (
            f"{self.kept:,} of {self.rows:,} rows kept ({self.format}), {self.tokens:,} tokens, "
            f"{self.trained_tokens:,} trained{share}"
        )
        events = {f"dropped, {reason}": tally for reason, tally in self.dropped.items()}
        events |= {"truncated": self.truncated, "special tokens spelt by content": self.special_in_text}
        for event, tally in events.items():
            if tally.count:
                more = ["..."] if tally.count > len(tally.examples) else []
                yield f"{event}: {tally.count:,} ({'; '.join([*tally.in_words(), *more])})"


def no_rows_left_error(name: str, report: Report, advice: Iterable[str] = ()) -> UserError:
    """Return the error for a data set that has no row left."""
    return UserError("\n".join([f"no row of {name} is left to train on", *report.lines(), *advice]))


@dataclass(frozen=True, kw_only=True)
class SetSummary:
    """Facts about one data set."""

    name: str
    """As the configuration names it."""
    report: Report
    lengths: Array
    """Tokens of each sample (n,), including samples that are dropped or cut because they are too long."""
    epochs: float
    """Times that the run reads it."""
    max_epochs: float | None
    """Times that it may be read; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """Facts about the data of a run, known without training."""

    sets: Sequence[SetSummary]
    max_length: int
    """Most tokens of a sample, to compare `SetSummary.lengths` with."""
    windows_per_epoch: int
    """Rows (T,) of batches in one pass over all data."""
    packing_efficiency: float | None
    """Fraction of these rows' positions that hold data; None: samples are not packed."""
    follows_seed: bool
    """Whether configuration and seed alone decide the order, so that the data of any step is known in advance."""

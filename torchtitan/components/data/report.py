"""What became of the rows of data sets, and what is known of a loader's data before any training."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from torchtitan.components.data.plan.sampler import Array
from torchtitan.tools.errors import UserError

N_EXAMPLES = 3
"""Samples that a report names for each thing that happened to some."""


@dataclass(slots=True)
class Tally:
    """How many samples something happened to, and the first of them."""

    count: int = 0
    examples: list[tuple[str, str]] = field(default_factory=list)
    """Where they are, and what it was."""

    def add(self, where: str, what: str) -> None:
        """Count one more."""
        self.count += 1
        if len(self.examples) < N_EXAMPLES:
            self.examples.append((where, what))

    def in_words(self) -> Iterator[str]:
        """The examples, those of the same kind together: `a.jsonl:1, a.jsonl:7: no text`."""
        places: dict[str, list[str]] = {}
        for where, what in self.examples:
            places.setdefault(what, []).append(where)
        return (f"{', '.join(where)}: {what}" for what, where in places.items())


@dataclass(slots=True)
class Report:
    """What became of a data set's rows."""

    format: str = ""
    """How the rows were read."""
    rows: int = 0
    kept: int = 0
    tokens: int = 0
    """Tokens of the samples that are kept."""
    trained_tokens: int = 0
    """Those of them that are predicted."""
    truncated: Tally = field(default_factory=Tally)
    spelt: Tally = field(default_factory=Tally)
    """Samples whose content spells special tokens, which are encoded as such."""
    dropped: dict[str, Tally] = field(default_factory=dict)
    """By reason: the option that decides."""
    unread: list[str] = field(default_factory=list)
    """The columns that are not read, though they look as if they mattered."""

    @property
    def n_dropped(self) -> int:
        """Rows that are left out, whatever the reason."""
        return sum(tally.count for tally in self.dropped.values())

    def drop(self, where: str, reason: str, why: str) -> None:
        """Count a row that is left out."""
        self.dropped.setdefault(reason, Tally()).add(where, why)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Self:
        """What `to_dict` gave."""

        def tally(of: dict[str, Any]) -> Tally:
            return Tally(of["count"], [(where, what) for where, what in of["examples"]])

        tallies = {name: tally(document[name]) for name in ("truncated", "spelt")}
        dropped = {reason: tally(of) for reason, of in document["dropped"].items()}
        return cls(**{**document, **tallies, "dropped": dropped})

    def lines(self) -> Iterator[str]:
        """The report in words: first the whole, then what happened to some samples, with examples."""
        share = f" ({self.trained_tokens / self.tokens:.0%})" if self.tokens else ""
        yield (
            f"{self.kept:,} of {self.rows:,} rows kept ({self.format}), {self.tokens:,} tokens, "
            f"{self.trained_tokens:,} trained{share}"
        )
        events = {f"dropped, {reason}": tally for reason, tally in self.dropped.items()}
        events |= {"truncated": self.truncated, "special tokens spelt by content": self.spelt}
        for event, tally in events.items():
            if tally.count:
                more = ["..."] if tally.count > len(tally.examples) else []
                yield f"{event}: {tally.count:,} ({'; '.join([*tally.in_words(), *more])})"


def none_left(name: str, report: Report, advice: Iterable[str] = ()) -> UserError:
    """The error for a data set of which no row is kept."""
    return UserError("\n".join([f"no row of {name} is left to train on", *report.lines(), *advice]))


@dataclass(frozen=True, kw_only=True)
class SetSummary:
    """One data set."""

    name: str
    """As the configuration names it."""
    report: Report
    """What became of its rows."""
    lengths: Array
    """Tokens of each sample (n,), those included that are left out or cut because they are too long."""
    epochs: float
    """How often the run reads it."""
    max_epochs: float | None
    """How often it may be read; None: without limit."""


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """All data sets of a loader, and how they become samples of the model."""

    sets: Sequence[SetSummary]
    max_length: int
    """Most tokens of a sample, for `SetSummary.lengths` to be compared with."""
    windows_per_epoch: int
    """Rows (T,) of batches that all data makes when it is read once."""
    packing_efficiency: float | None
    """Share of these rows' positions that hold data; None: samples are not packed."""
    follows_seed: bool
    """Whether the order is decided by configuration and seed alone, so that any step's data can be told beforehand."""

"""Reports on the rows of datasets, and summaries of a loader's data."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Self, TypedDict

from torchtitan.components.data.plan.sampler import Array
from torchtitan.tools.errors import UserError

N_EXAMPLES = 3
"""Examples kept by an `ExampleCounter`."""

BEFORE_THE_LIMIT = "counted before --dataloader.too_long"
"""What the counts of turns mean if samples are too long."""


@dataclass(slots=True)
class ExampleCounter:
    """Count of samples with a property, with the first few as examples."""

    count: int = 0
    examples: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of a sample's location and a description."""

    def add(self, where: str, what: str | Callable[[], str]) -> None:
        """Count a sample. `what` is its description, or a function that returns it, called only for
        an example."""
        self.count += 1
        if len(self.examples) < N_EXAMPLES:
            self.examples.append((where, what if isinstance(what, str) else what()))

    def add_all(self, other: Self) -> None:
        self.count += other.count
        self.examples = [*self.examples, *other.examples][:N_EXAMPLES]

    def in_words(self) -> Iterator[str]:
        """Yield the examples, grouped by description: `a.jsonl:1, a.jsonl:7: no text`."""
        locations: dict[str, list[str]] = {}
        for where, what in self.examples:
            locations.setdefault(what, []).append(where)
        return (f"{', '.join(where)}: {what}" for what, where in locations.items())


class StoredCounter(TypedDict):
    """An `ExampleCounter` in JSON."""

    count: int
    examples: list[tuple[str, str]]


@dataclass(slots=True)
class Report:
    """Counts of a dataset's rows and tokens."""

    format: str = ""
    rows: int = 0
    kept: int = 0
    """Rows with at least one kept sample."""
    samples: int = 0
    """Samples, at least as many as kept rows."""
    tokens: int = 0
    trained_tokens: int = 0
    """Tokens that are predicted."""
    truncated: ExampleCounter = field(default_factory=ExampleCounter)
    special_in_text: ExampleCounter = field(default_factory=ExampleCounter)
    """Samples with special tokens written in their text, which are encoded as special tokens."""
    left_out: ExampleCounter = field(default_factory=ExampleCounter)
    """Samples that are dropped although others of their row are kept."""
    turns: int = 0
    """Trained turns of the assistant."""
    stops: int = 0
    """Trained turns that end with a stop."""
    only_stops: ExampleCounter = field(default_factory=ExampleCounter)
    """Samples with turns that train only the stop."""
    unprompted: ExampleCounter = field(default_factory=ExampleCounter)
    """Turns of kept rows that are not trained, as the template has no prompt for them."""
    options: dict[str, int] = field(default_factory=dict)
    """Samples by the template options that render them."""
    unread_options: dict[str, ExampleCounter] = field(default_factory=dict)
    """Kept rows by the options that they set although the template does not read them."""
    lost: dict[str, ExampleCounter] = field(default_factory=dict)
    """Kept samples by the part of their conversation that the template omits."""
    dropped: dict[str, ExampleCounter] = field(default_factory=dict)
    """Dropped rows by the reason, mostly the option that drops them; see `Dropped`."""
    normal: ExampleCounter = field(default_factory=ExampleCounter)
    """Rows whose messages are read in another spelling than the normal form, with that form."""
    unread: dict[str, ExampleCounter] = field(default_factory=dict)
    """Rows by their ignored columns whose names suggest an effect on training."""

    @property
    def n_dropped(self) -> int:
        return sum(counter.count for counter in self.dropped.values())

    def drop(self, where: str, reason: str, why: str) -> None:
        self.dropped.setdefault(reason, ExampleCounter()).add(where, why)

    @classmethod
    def total(cls, reports: Iterable[Self]) -> Self:
        """Return the sum of reports."""
        total = cls()
        for report in reports:
            total.add(report)
        return total

    def add(self, other: Self) -> None:
        """Add the counts of another report."""
        formats = dict.fromkeys([*self.format.split(", "), *other.format.split(", ")])
        self.format = ", ".join(filter(None, formats))
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _COUNTERS:
            getattr(self, name).add_all(getattr(other, name))
        for name in _COUNTERS_BY_KIND:
            for kind, counter in getattr(other, name).items():
                getattr(self, name).setdefault(kind, ExampleCounter()).add_all(counter)
        for option, count in other.options.items():
            self.options[option] = self.options.get(option, 0) + count

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Self:
        """Create a report from the result of `dataclasses.asdict`, written as JSON. A counter that
        an earlier version did not have is empty. Raise `TypeError`, `LookupError` or `ValueError`
        for a damaged document."""

        def to_counter(entry: StoredCounter) -> ExampleCounter:
            return ExampleCounter(
                index(entry["count"]), [(where, what) for where, what in entry["examples"]]
            )

        def by_name(entries: dict[str, StoredCounter] | list[str]) -> dict[str, ExampleCounter]:
            if isinstance(entries, list):  # the unread columns of an earlier version
                return {name: ExampleCounter() for name in entries}
            return {name: to_counter(entry) for name, entry in entries.items()}

        numbers = {name: index(document[name]) for name in _NUMBERS if name in document}
        counters = {name: to_counter(document[name]) for name in _COUNTERS if name in document}
        by_kind = {name: by_name(document.get(name, {})) for name in _COUNTERS_BY_KIND}
        options = {name: index(count) for name, count in document.get("options", {}).items()}
        return cls(**{**document, **numbers, **counters, **by_kind, "options": options})

    def events(self) -> Iterator[tuple[str, ExampleCounter]]:
        """Yield the changes to rows and samples, with their counts."""
        for reason, counter in self.dropped.items():
            yield f"dropped, {reason}", counter
        yield "samples dropped from kept rows", self.left_out
        for part, counter in self.lost.items():
            yield f"without the {part}", counter
        for name, counter in self.unread_options.items():
            yield f"with the option {name}, which has no effect", counter
        for column, counter in self.unread.items():
            yield f"with the column {column}, which is not read", counter
        yield "nothing but the stop is trained", self.only_stops
        yield "turns without a prompt, not trained", self.unprompted
        yield "truncated", self.truncated
        yield "special tokens written in the text", self.special_in_text

    @property
    def are_turns_limited(self) -> bool:
        """True if samples are dropped or truncated because they are too long. `turns` and `stops`
        still count their turns, since a cache has no turns of each sample."""
        is_dropped = "too_long" in self.dropped or "untrained" in self.dropped
        return is_dropped or bool(self.truncated.count or self.left_out.count)

    def lines(self) -> Iterator[str]:
        """Yield the totals, then the counts of dropped and changed samples with examples."""
        share = f" ({self.trained_tokens / self.tokens:.0%})" if self.tokens else ""
        yield (
            f"{self.kept:,} of {self.rows:,} rows kept ({self.format}), "
            + (f"{self.samples:,} samples, " if self.samples != self.kept else "")
            + f"{self.tokens:,} tokens, {self.trained_tokens:,} trained{share}"
        )
        if self.turns:
            before = f" ({BEFORE_THE_LIMIT})" if self.are_turns_limited else ""
            yield f"{self.stops:,} of {self.turns:,} trained turns teach a stop{before}"
        for option, count in self.options.items():
            yield f"samples rendered with {option}: {count:,}"
        for event, counter in self.events():
            if counter.count:
                more = ["..."] if counter.count > len(counter.examples) else []
                examples = (
                    f" ({'; '.join([*counter.in_words(), *more])})" if counter.examples else ""
                )
                yield f"{event}: {counter.count:,}{examples}"


_NUMBERS = ("rows", "kept", "samples", "tokens", "trained_tokens", "turns", "stops")
_COUNTERS = ("truncated", "special_in_text", "left_out", "only_stops", "unprompted", "normal")
_COUNTERS_BY_KIND = ("dropped", "lost", "unread_options", "unread")


def no_rows_left_error(name: str, report: Report, advice: Iterable[str] = ()) -> UserError:
    """Return the error for a dataset without usable rows."""
    untrained = report.dropped.get("untrained")
    if untrained is not None and untrained.count == report.rows:
        advice = [*advice, "a row needs a message of the assistant, or --dataloader.train_on all"]
    return UserError(
        f"{name} has no rows left to train on: {'; '.join([*report.lines(), *advice])}"
    )


@dataclass(frozen=True, kw_only=True)
class SetSummary:
    """Summary of one dataset."""

    name: str
    """Name in the configuration."""
    report: Report
    lengths: Array
    """Tokens of each sample (n,), including samples dropped or truncated as too long."""
    epochs: float
    """Number of times that the run reads the dataset."""
    max_epochs: float | None
    """Largest allowed number of epochs; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """Summary of a run's data, available without training."""

    sets: Sequence[SetSummary]
    sources: Sequence[tuple[str, Report]] = ()
    """Name and counts of each source of prepared data."""
    max_length: int
    """Maximum tokens per sample; longer samples are dropped or truncated."""
    windows_per_epoch: int
    """Windows in one pass over all data; for pre-training with weights, until the first dataset has
    been read."""
    packing_efficiency: float | None
    """Fraction of the windows' positions that hold data; None: samples are not packed."""
    follows_seed: bool
    """True if configuration and seed determine the order, so that the data of any step is known in
    advance."""

"""What becomes of rows that are empty, broken, filtered or without anything to train on, and the account of it.

What becomes of samples that are too long is decided later, when the size of a window is known: see `fitting`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Self

from torchtitan.components.data.finetuning.conversation import BrokenSample, EmptySample
from torchtitan.components.data.finetuning.filters import Filters
from torchtitan.components.data.finetuning.row_encoders import EncodedRow
from torchtitan.tools.errors import UserError

Policy = Literal["drop", "error"]

N_EXAMPLES = 3
"""Samples that a report names for each thing that happened to some."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which samples are kept, and how. The names are those of the loader's options."""

    empty: Policy = "drop"
    """What to do with rows that say nothing."""
    broken: Policy = "error"
    """What to do with rows that cannot be read, converted or encoded."""
    untrained: Policy | None = "drop"
    """What to do with samples none of whose tokens is predicted; None: nothing, since the encoder sees to it."""
    filters: Filters = field(default_factory=Filters)
    """Limits for the tokens; a sample beyond one is dropped."""


class Dropped(NamedTuple):
    """A sample that is left out."""

    reason: str
    """The option that decides: `too_long`, `broken`, `min_tokens`, …"""
    why: str
    """What is the matter with this one."""


def apply_rules(sample: EncodedRow | BrokenSample, rules: Rules) -> EncodedRow | Dropped:
    """The sample, or why it is left out.

    Raises:
        UserError: what is the matter, where the policy is `error`; without the place, which the caller knows.
    """
    if isinstance(sample, EmptySample):
        return _drop("empty", str(sample), rules.empty)
    if isinstance(sample, BrokenSample):
        return _drop("broken", str(sample), rules.broken)
    ids = sample.ids
    if len(ids) == 0:
        return _drop("empty", "it has no tokens", rules.empty)
    if objection := rules.filters.objection(ids):
        return Dropped(*objection)
    if rules.untrained and sample.n_trained == 0:
        return _drop("untrained", "none of its tokens is trained", rules.untrained)
    return sample


def _drop(reason: str, why: str, policy: Policy) -> Dropped:
    if policy == "error":
        raise UserError(
            f"{why}; --dataloader.{reason} drop leaves such rows out (torchtitan data inspect says how many these are)"
        )
    return Dropped(reason, why)


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

    def drop(self, where: str, dropped: Dropped) -> None:
        """Count a row that is left out."""
        self.dropped.setdefault(dropped.reason, Tally()).add(where, dropped.why)

    def keep(self, where: str, sample: EncodedRow) -> None:
        """Count a sample that is kept."""
        self.kept += 1
        self.tokens += sample.n_tokens
        self.trained_tokens += sample.n_trained
        if sample.n_spelt:
            self.spelt.add(where, f"{sample.n_spelt} of its tokens")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Self:
        """What `to_dict` gave."""
        tallies = {name: _tally(document[name]) for name in ("truncated", "spelt")}
        dropped = {reason: _tally(tally) for reason, tally in document["dropped"].items()}
        return cls(**{**document, **tallies, "dropped": dropped})

    def lines(self) -> Iterator[str]:
        """The report in words: first the whole, then what happened to some samples, with examples."""
        share = f" ({self.trained_tokens / self.tokens:.0%})" if self.tokens else ""
        yield (
            f"{self.kept:,} of {self.rows:,} rows kept ({self.format}), {self.tokens:,} tokens, "
            f"{self.trained_tokens:,} trained{share}"
        )
        for reason, tally in self.dropped.items():
            yield f"dropped, {reason}: {tally.count:,} ({_examples(tally)})"
        if self.truncated.count:
            yield f"truncated: {self.truncated.count:,} ({_examples(self.truncated)})"
        if self.spelt.count:
            yield f"special tokens spelt by content: {self.spelt.count:,} ({_examples(self.spelt)})"


def none_left(name: str, report: Report, advice: Iterable[str] = ()) -> UserError:
    """The error for a data set of which no row is kept."""
    return UserError("\n".join([f"no row of {name} is left to train on", *report.lines(), *advice]))


def _tally(document: dict[str, Any]) -> Tally:
    return Tally(document["count"], [(where, what) for where, what in document["examples"]])


def _examples(tally: Tally) -> str:
    places: dict[str, list[str]] = {}
    for where, what in tally.examples:
        places.setdefault(what, []).append(where)
    shown = "; ".join(f"{', '.join(where)}: {what}" for what, where in places.items())
    return shown + ("; ..." if tally.count > len(tally.examples) else "")

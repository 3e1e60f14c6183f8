"""Several data sets under one numbering, by which batches and the ledger know their samples."""

import bisect
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from torchtitan.components.data.finetuning.policies import Report

_IN_FILE = re.compile(r"( \(.*\))?(:\d+|, (row|element) \d+)?")
"""What is behind the name of a file or data set in the place of a row: `:17`, `, row 3`, ` (train), row 3`."""


class SampleSet(Protocol):
    """The samples of one data set."""

    report: Report
    """What became of its rows."""

    @property
    def n_samples(self) -> int:
        """Number of samples."""

    def describe(self, index: int) -> str:
        """Where the row is of the sample with a number from 0."""


T = TypeVar("T", bound=SampleSet)


class NumberedSets(Generic[T]):
    """Data sets side by side: the samples of the first, then those of the second, and so on."""

    def __init__(self, names: Sequence[str], sets: Sequence[T]):
        self.names = list(names)
        self.sets = list(sets)
        self.first = [0, *itertools.accumulate(of_set.n_samples for of_set in sets)]
        """Number of the first sample of each data set, and of all samples."""

    def locate(self, number: int) -> tuple[int, int]:
        """The data set that a sample is in, by its place among them, and its number there."""
        source = bisect.bisect_right(self.first, number) - 1
        return source, number - self.first[source]

    def describe(self, number: int) -> str:
        """Where a sample's row is; with the data set's name, where there are several: `b/c.jsonl:17` if that is the
        file, else `my_set: c.jsonl:17`."""
        source, index = self.locate(number)
        place, name = self.sets[source].describe(index), self.names[source]
        if len(self.sets) == 1:
            return place
        parent, slash, last = name.rpartition("/")
        names_itself = place.startswith(last) and _IN_FILE.fullmatch(place, len(last))
        return f"{parent}{slash}{place}" if names_itself else f"{name}: {place}"

    def report_lines(self) -> Iterator[str]:
        """What became of the rows of each data set, in words."""
        for name, of_set in zip(self.names, self.sets, strict=True):
            yield from (f"{name}: {line}" for line in of_set.report.lines())

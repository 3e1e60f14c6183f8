"""Several data sets under one numbering, by which batches and the ledger know their samples."""

import bisect
import itertools
import re
from collections.abc import Iterator, Sequence

from torchtitan.components.data.finetuning.fitting import FittedSamples
from torchtitan.components.data.finetuning.row_encoders import EncodedRow
from torchtitan.components.data.packing import Array

_IN_FILE = re.compile(r"( \(.*\))?(:\d+|, (row|element) \d+)?")
"""What is behind the name of a file or data set in the place of a row: `:17`, `, row 3`, ` (train), row 3`."""


class SampleSets:
    """Data sets side by side: the samples of the first, then those of the second, and so on."""

    def __init__(self, names: Sequence[str], sets: Sequence[FittedSamples]):
        self.names = list(names)
        self.sets = list(sets)
        self.first = [0, *itertools.accumulate(of_set.n_samples for of_set in sets)]
        """Number of the first sample of each data set, and of all samples."""

    @property
    def positions(self) -> list[Array]:
        """For each data set, the positions of a window that its samples take: the last token predicts nothing."""
        return [of_set.lengths - 1 for of_set in self.sets]

    @property
    def trained_fraction(self) -> float:
        """The share of these positions that are trained."""
        n_positions = sum(int(of_set.sum()) for of_set in self.positions)
        return sum(of_set.report.trained_tokens for of_set in self.sets) / n_positions

    def locate(self, number: int) -> tuple[int, int]:
        """The data set that a sample is in, by its place among them, and its number there."""
        source = bisect.bisect_right(self.first, number) - 1
        return source, number - self.first[source]

    def sample(self, number: int) -> EncodedRow:
        """The sample with a number."""
        source, index = self.locate(number)
        return self.sets[source].sample(index)

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

    def warnings(self) -> Iterator[str]:
        """What somebody has to know before training on the data sets."""
        for name, of_set in zip(self.names, self.sets, strict=True):
            yield from (f"{name}: {warning}" for warning in of_set.warnings())

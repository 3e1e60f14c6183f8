"""From samples to batches: samples that fit into a window, one numbering over all data sets, and packed windows."""

import bisect
import copy
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from torchtitan.components.data.base import NO_DOCUMENT, Batch
from torchtitan.components.data.finetuning.chat_encoding import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.filters import Dropped, Policy
from torchtitan.components.data.finetuning.sample_cache import SampleCache
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.report import ExampleCounter, Report, no_rows_left_error
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.tools.errors import UserError

MANY_TOO_LONG = 0.01
"""Fraction of a data set's rows that may be dropped as too long without a warning."""

TooLong = Literal["drop", "truncate_left", "truncate_right", "error"]
"""`truncate_left` keeps a sample's end, `truncate_right` its beginning."""


class LengthFilteredDataset:
    """Samples of a cache that fit, whole or truncated.

    Args:
        cache: all samples.
        max_length: most tokens of each sequence of a sample.
        too_long: policy for samples with a longer sequence. Truncation removes the same number of tokens from all
            sequences of a sample, so that common beginnings stay equal.
        untrained: policy for samples without trained tokens after truncation. None: truncate only if all trained tokens
            stay, since comparisons need whole answers; drop other samples.
        name: of the data set, for messages.

    Raises:
        UserError: a policy is `error` and applies, or no sample is left.
    """

    def __init__(self, cache: SampleCache, max_length: int, too_long: TooLong, untrained: Policy | None, name: str):
        self._cache, self._too_long, self._untrained = cache, too_long, untrained
        self.max_length = max_length
        self.report: Report = copy.deepcopy(cache.report)
        """The cache's report, updated for samples that are too long."""
        lengths = cache.lengths
        self.all_lengths: Array = lengths
        """Tokens of the longest sequence of each sample of the cache, including dropped and truncated ones."""
        keep = np.ones(len(lengths), bool)
        for index in np.flatnonzero(lengths > max_length).tolist():
            keep[index] = self._fit(index, int(lengths[index]))
        self._indices = np.flatnonzero(keep)
        self.lengths: Array = np.minimum(lengths[keep], max_length)
        """Tokens of the longest sequence of each sample, (n_samples,)."""
        if not len(self._indices):
            raise no_rows_left_error(name, self.report, self.warnings())

    @property
    def n_samples(self) -> int:
        return len(self._indices)

    def sample(self, index: int) -> EncodedRow:
        return self._cut(self._cache.sample(int(self._indices[index])))

    def describe(self, index: int) -> str:
        """Return the location of the sample's row: `my.jsonl:17`."""
        return self._cache.describe(int(self._indices[index]))

    def warnings(self) -> Iterator[str]:
        """Yield warnings to read before training on the samples."""
        if unread := self.report.unread:
            plural = len(unread) > 1
            yield (
                f"the column{'s' * plural} {', '.join(unread)} {'are' if plural else 'is'} not read (format "
                f"{self.report.format}), though the name{'s' * plural} may matter to training; --dataloader.format can "
                "name a function that reads the rows otherwise"
            )
        dropped = self.report.dropped.get("too_long", ExampleCounter()).count
        if dropped > MANY_TOO_LONG * self.report.rows:
            yield (
                f"{dropped:,} of {self.report.rows:,} rows ({dropped / self.report.rows:.1%}) are dropped because they "
                f"have more than {self.max_length:,} tokens: raise --training.seq_len"
                + (f", or cut them by --dataloader.too_long {self._cuts}" if self._too_long == "drop" else "")
            )

    @property
    def _cuts(self) -> str:
        return "truncate_left" if self._untrained is None else "truncate_left or truncate_right"

    def _fit(self, index: int, length: int) -> bool:
        """Count a sample that is too long; return whether it is kept."""
        where, whole, report = self._cache.describe(index), self._cache.sample(index), self.report
        holds = f"{self.max_length:,} fit" if self._untrained is None else f"a window holds {self.max_length:,}"
        size = f"{length:,} tokens, {holds}"
        left = self._shortened(whole, where, size)
        report.tokens -= whole.n_tokens
        report.trained_tokens -= whole.n_trained
        if isinstance(left, Dropped):
            report.kept -= 1
            report.drop(where, *left)
            return False
        report.tokens += left.n_tokens
        report.trained_tokens += left.n_trained
        report.truncated.add(where, size)
        return True

    def _shortened(self, whole: EncodedRow, where: str, size: str) -> EncodedRow | Dropped:
        if self._too_long == "error":
            comma = " or" if self._untrained is None else ","
            raise UserError(f"{where}: {size}; --dataloader.too_long can also be drop{comma} {self._cuts}")
        if self._too_long == "drop":
            return Dropped("too_long", size)
        cut = self._cut(whole)
        if self._untrained is None:
            lost = cut.n_trained < whole.n_trained
            return Dropped("too_long", f"{size}, and its answers alone are too long") if lost else cut
        if cut.n_trained:
            return cut
        why = f"none of its tokens is trained once it is cut ({size})"
        if self._untrained == "error":
            raise UserError(f"{where}: {why}; --dataloader.untrained drop leaves such rows out")
        return Dropped("untrained", why)

    def _cut(self, sample: EncodedRow) -> EncodedRow:
        n_beyond = max(len(part.ids) for part in sample.parts) - self.max_length
        if n_beyond <= 0:
            return sample
        kept = slice(n_beyond, None) if self._too_long == "truncate_left" else slice(-n_beyond)
        parts = (part._replace(ids=part.ids[kept], trained=part.trained[kept]) for part in sample.parts)
        return sample._replace(parts=tuple(parts))


_IN_FILE = re.compile(r"( \(.*\))?(:\d+|, (row|element) \d+)?")
"""Suffix of a row's location after the file or data set: `:17`, `, row 3`, ` (train), row 3`."""


class SampleSets:
    """Data sets under one numbering: the samples of the first, then of the second, and so on."""

    def __init__(self, names: Sequence[str], sets: Sequence[LengthFilteredDataset]):
        self.names = list(names)
        self.sets = list(sets)
        self.first = [0, *itertools.accumulate(of_set.n_samples for of_set in sets)]
        """Number of the first sample of each data set, and the total."""

    @property
    def positions(self) -> list[Array]:
        """Window positions of each data set's samples; a sample's last token needs none."""
        return [of_set.lengths - 1 for of_set in self.sets]

    @property
    def trained_fraction(self) -> float:
        """Fraction of these positions that are trained."""
        n_positions = sum(int(of_set.sum()) for of_set in self.positions)
        return sum(of_set.report.trained_tokens for of_set in self.sets) / n_positions

    def locate(self, number: int) -> tuple[int, int]:
        """Return the index of a sample's data set, and the sample's number in it."""
        source = bisect.bisect_right(self.first, number) - 1
        return source, number - self.first[source]

    def sample(self, number: int) -> EncodedRow:
        source, index = self.locate(number)
        return self.sets[source].sample(index)

    def describe(self, number: int) -> str:
        """Return the location of a sample's row, with the data set if there are several: `b/c.jsonl:17` if that is the
        file, otherwise `my_set: c.jsonl:17`."""
        source, index = self.locate(number)
        place, name = self.sets[source].describe(index), self.names[source]
        if len(self.sets) == 1:
            return place
        parent, slash, last = name.rpartition("/")
        names_itself = place.startswith(last) and _IN_FILE.fullmatch(place, len(last))
        return f"{parent}{slash}{place}" if names_itself else f"{name}: {place}"

    def numbers_of(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of the samples that `describe` names; raises `UserError` for an unknown name."""
        wanted = set(names)
        found = {name: number for number in range(self.first[-1]) if (name := self.describe(number)) in wanted}
        if missing := [name for name in names if name not in found]:
            raise UserError(f"'{missing[0]}' is no sample of this data; was it another configuration's?")
        return [found[name] for name in names]

    def report_lines(self) -> Iterator[str]:
        for name, of_set in zip(self.names, self.sets, strict=True):
            yield from (f"{name}: {line}" for line in of_set.report.lines())

    def warnings(self) -> Iterator[str]:
        for name, of_set in zip(self.names, self.sets, strict=True):
            yield from (f"{name}: {warning}" for warning in of_set.warnings())


Windows = Sequence[Sequence[EncodedRow]]
"""Samples of each window of a batch; an empty window is padding."""


class WindowDataset(Dataset[Batch]):
    """Batches by the sample numbers in each of their B windows; `collate` returns a batch without `documents`."""

    def __init__(self, samples: SampleSets, seq_len: int, collate: Callable[[Windows, int], Batch]):
        self.samples, self.seq_len, self.collate = samples, seq_len, collate

    def __getitem__(self, windows: Sequence[Sequence[int]]) -> Batch:
        batch = self.collate([[self.samples.sample(number) for number in window] for window in windows], self.seq_len)
        documents = np.full((len(windows), max(1, *map(len, windows))), NO_DOCUMENT, np.int64)
        for row, window in zip(documents, windows, strict=True):
            row[: len(window)] = window
        batch["documents"] = torch.from_numpy(documents)
        return batch


def pack_windows(windows: Windows, seq_len: int, part: int = 0) -> Batch:
    """Pack one sequence of each sample, see `pack_samples`; all tensors are (B, `seq_len`)."""
    packed = [pack_samples([sample.parts[part] for sample in window], seq_len) for window in windows]
    return {name: torch.from_numpy(np.stack([window[name] for window in packed])) for name in packed[0]}


def pack_samples(samples: Sequence[EncodedSample], seq_len: int) -> dict[str, Array]:
    """Pack whole samples, each a separate document, into one window of `seq_len` positions.

    Returns:
        `input`, `labels` and `positions`, each (seq_len,). The rest of the window is padding: a separate document with
            ignored labels.
    """
    window = {
        "input": np.zeros(seq_len, np.int64),
        "labels": np.full(seq_len, IGNORE_INDEX, np.int64),
        "positions": np.zeros(seq_len, np.int64),
    }
    start = 0
    for sample in samples:
        stop = start + len(sample.ids) - 1
        window["input"][start:stop] = sample.ids[:-1]
        window["labels"][start:stop] = np.where(sample.trained[1:], sample.ids[1:], IGNORE_INDEX)
        window["positions"][start:stop] = np.arange(stop - start)
        start = stop
    assert start <= seq_len
    window["positions"][start:] = np.arange(seq_len - start)
    return window

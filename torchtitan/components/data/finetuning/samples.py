"""Selection of samples that fit into a window, and batches of packed windows."""

import bisect
import copy
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from torchtitan.components.data.base import NO_DOCUMENT, Batch, check_ids, to_batch
from torchtitan.components.data.finetuning.columns import are_images
from torchtitan.components.data.finetuning.encoded import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.filters import Dropped, Policy
from torchtitan.components.data.finetuning.sample_cache import SampleCache
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.report import ExampleCounter, Report, no_rows_left_error
from torchtitan.components.losses.labels import IGNORE_INDEX
from torchtitan.tools.errors import UserError

MANY_TOO_LONG = 0.01
"""A warning is logged if more than this fraction of the rows are dropped because of their
length."""

TooLong = Literal["drop", "truncate_left", "truncate_right", "error"]
"""`truncate_left` keeps the end of a sample, `truncate_right` its beginning."""


@dataclass(frozen=True)
class LengthLimit:
    """Limit on the tokens of the longest sequence of a sample."""

    max_length: int
    too_long: TooLong
    """Policy for samples with a longer sequence. Truncation removes the same number of tokens from
    all sequences of a sample, so that common prefixes stay equal."""
    untrained: Policy | None
    """Policy for samples without trained tokens after truncation. None: drop samples if truncation
    would remove trained tokens, since comparisons need complete answers."""

    @property
    def truncations(self) -> str:
        """The policies that truncate samples of this kind, in words."""
        return "truncate_left" if self.untrained is None else "truncate_left or truncate_right"

    def apply(self, sample: EncodedRow, where: str) -> EncodedRow | Dropped:
        """Return a sample, possibly truncated, or the reason to drop it. Raise `UserError` for the
        policy `error`."""
        length = max(len(part.ids) for part in sample.parts)
        return sample if length <= self.max_length else self._shorten(sample, where, length)

    def counted(self, sample: EncodedRow, where: str, report: Report) -> EncodedRow | Dropped:
        """As `apply`, and correct the tokens that a report has counted, and its truncated
        samples."""
        result = self.apply(sample, where)
        if result is sample:
            return sample
        report.tokens -= sample.n_tokens
        report.trained_tokens -= sample.n_trained
        if not isinstance(result, Dropped):
            report.tokens += result.n_tokens
            report.trained_tokens += result.n_trained
            length = max(len(part.ids) for part in sample.parts)
            report.truncated.add(where, self.size_in_words(length))
        return result

    def size_in_words(self, length: int) -> str:
        """Compare a length with the limit in words."""
        limit = (
            f"{self.max_length:,} fit"
            if self.untrained is None
            else f"a window holds {self.max_length:,}"
        )
        return f"{length:,} tokens, {limit}"

    def _shorten(self, sample: EncodedRow, where: str, length: int) -> EncodedRow | Dropped:
        size = self.size_in_words(length)
        if self.too_long == "error":
            comma = " or" if self.untrained is None else ","
            raise UserError(
                f"{where}: {size}; set --dataloader.too_long to drop{comma} {self.truncations}"
            )
        if self.too_long == "drop":
            return Dropped("too_long", size)
        if sample.images:
            return Dropped("too_long", f"{size}, and a sample with images is not cut")
        truncated = self.truncate(sample)
        if self.untrained is None:
            is_incomplete = truncated.n_trained < sample.n_trained
            return (
                Dropped("too_long", f"{size}, and its answers alone are too long")
                if is_incomplete
                else truncated
            )
        if truncated.n_trained:
            return truncated
        why = f"it has no trained tokens after truncation ({size})"
        if self.untrained == "error":
            raise UserError(f"{where}: {why}; set --dataloader.untrained drop to skip such rows")
        return Dropped("untrained", why)

    def truncate(self, sample: EncodedRow) -> EncodedRow:
        """Return a sample without its excess tokens."""
        n_excess = max(len(part.ids) for part in sample.parts) - self.max_length
        if n_excess <= 0:
            return sample
        kept = slice(n_excess, None) if self.too_long == "truncate_left" else slice(-n_excess)
        parts = (
            part._replace(ids=part.ids[kept], trained=part.trained[kept]) for part in sample.parts
        )
        return sample._replace(parts=tuple(parts))


class LengthFilteredDataset:
    """Samples of a cache within a limit, possibly truncated. `name` is the dataset's, for messages.
    Raises `UserError` if a sample violates a policy `error`, or if no sample is left."""

    def __init__(self, cache: SampleCache, limit: LengthLimit, name: str):
        self._cache = cache
        self._limit = limit
        max_length = limit.max_length
        self.report: Report = copy.deepcopy(cache.report)
        """Report of the cache, updated for samples that are too long."""
        lengths = cache.lengths
        self.all_lengths: Array = lengths
        """Tokens of the longest sequence of each cached sample, including dropped and truncated
        ones."""
        keep = np.ones(len(lengths), bool)
        dropped: list[tuple[int, Dropped]] = []
        for index in np.flatnonzero(lengths > max_length).tolist():
            result = limit.counted(cache.sample(index), cache.describe(index), self.report)
            if isinstance(result, Dropped):
                keep[index] = False
                dropped.append((index, result))
        self._count_dropped(dropped, keep)
        self._indices = np.flatnonzero(keep)
        self.lengths: Array = np.minimum(lengths[keep], max_length)
        """Tokens of the longest sequence of each sample, (n_samples,)."""
        if not len(self._indices):
            raise no_rows_left_error(name, self.report, self.warnings())

    @property
    def n_samples(self) -> int:
        return len(self._indices)

    def sample(self, index: int) -> EncodedRow:
        return self._limit.truncate(self._cache.sample(int(self._indices[index])))

    def sequence_positions(self) -> Array:
        """Return the window positions of each sample's sequences, (n_samples, n_sequences)."""
        lengths = self._cache.sequence_lengths[self._indices]
        n_excess = np.maximum(lengths.max(axis=1, keepdims=True) - self._limit.max_length, 0)
        positions: Array = np.maximum(lengths - n_excess - 1, 0)
        return positions

    def describe(self, index: int) -> str:
        """Return the name of a sample: `my.jsonl:17`; see `SampleCache`."""
        return self._cache.describe(int(self._indices[index]))

    def warnings(self) -> Iterator[str]:
        """Yield warnings about ignored columns and dropped samples."""
        return warnings_of(self.report, self._limit)

    def _count_dropped(self, dropped: Sequence[tuple[int, Dropped]], keep: Array) -> None:
        """Count rows without a kept sample as dropped, and dropped samples of other rows in
        `left_out`."""
        report, cache = self.report, self._cache
        has_several = report.samples > report.kept
        kept_rows: set[str] = set()
        if dropped and has_several:
            kept_rows = {cache.row_of(index) for index in np.flatnonzero(keep).tolist()}
        for row, found in itertools.groupby(dropped, lambda one: cache.row_of(one[0])):
            named = [(cache.describe(index), why) for index, why in found]
            count_too_long(report, row, named, is_kept=row in kept_rows)


def count_too_long(
    report: Report, row: str, dropped: Sequence[tuple[str, Dropped]], *, is_kept: bool
) -> None:
    """Correct a report that has counted all samples of a row, although a limit drops some.

    Args:
        row: location of the row.
        dropped: name of each dropped sample, and the reason.
        is_kept: whether other samples of the row are kept.
    """
    report.samples -= len(dropped)
    if is_kept:
        for name, (reason, why) in dropped:
            report.left_out.add(name, f"{reason}: {why}")
    elif dropped:
        report.kept -= 1
        report.drop(row, *dropped[0][1])


def warnings_of(report: Report, limit: LengthLimit) -> Iterator[str]:
    """Yield warnings about ignored columns and dropped samples, for samples within a limit."""
    if unread := report.unread:
        plural = len(unread) > 1
        counted = [f"{column} (rows: {rows.count:,})" for column, rows in unread.items()]
        images = (
            "; to train on images, use --config sft_images, dpo_images or grpo_images, and name "
            "their column if it is neither image nor images: --dataloader.columns images=COLUMN"
            if are_images(unread)
            else ""
        )
        yield (
            f"the column{'s' * plural} {', '.join(counted)} {'are' if plural else 'is'} "
            f"ignored (format {report.format}) but may affect training; to use "
            f"{'them' if plural else 'it'}, set --dataloader.format to a function that "
            f"converts the rows{images}"
        )
    if report.turns and not report.stops:
        yield (
            "no trained turn teaches a stop: the model will not end its answers; set another "
            "chat template"
        )
    if options := report.options:
        yield (
            f"some samples are rendered with {', '.join(options)}: to get such answers, use "
            "the same option of the chat template at inference"
        )
    dropped = report.dropped.get("too_long", ExampleCounter()).count
    if dropped > MANY_TOO_LONG * report.rows:
        yield (
            f"{dropped:,} of {report.rows:,} rows ({dropped / report.rows:.1%}) are "
            f"dropped because they have more than {limit.max_length:,} tokens; increase "
            "--training.seq_len"
            + (
                f", or set --dataloader.too_long {limit.truncations}"
                if limit.too_long == "drop"
                else ""
            )
        )


_IN_FILE = re.compile(r"( \(.*\))?(:\d+|, (row|element) \d+)?(, sample \d+)?")
"""Location within a file or dataset: `:17`, `, row 3`, ` (train), row 3`, `:17, sample 2`."""


class SampleSets:
    """Concatenation of datasets, with one numbering of all samples."""

    def __init__(self, names: Sequence[str], sets: Sequence[LengthFilteredDataset]):
        self.names = list(names)
        self.sets = list(sets)
        self.first = [0, *itertools.accumulate(data.n_samples for data in sets)]
        """Number of the first sample of each dataset, and the total."""

    @property
    def positions(self) -> list[Array]:
        """Window positions of each dataset's samples; the last token of a sample needs none."""
        return [data.lengths - 1 for data in self.sets]

    @property
    def trained_fraction(self) -> float:
        """Fraction of trained positions."""
        n_positions = sum(int(data.sum()) for data in self.positions)
        return sum(data.report.trained_tokens for data in self.sets) / n_positions

    def locate(self, number: int) -> tuple[int, int]:
        """Return the index of a sample's dataset, and the sample's number in that dataset."""
        source = bisect.bisect_right(self.first, number) - 1
        return source, number - self.first[source]

    def sample(self, number: int) -> EncodedRow:
        source, index = self.locate(number)
        return self.sets[source].sample(index)

    def describe(self, number: int) -> str:
        """Return the location of a sample's row, prefixed by the dataset if there is more than one:
        `b/c.jsonl:17` for a file, otherwise `my_set: c.jsonl:17`."""
        source, index = self.locate(number)
        location, name = self.sets[source].describe(index), self.names[source]
        if len(self.sets) == 1:
            return location
        parent, slash, last = name.rpartition("/")
        contains_name = location.startswith(last) and _IN_FILE.fullmatch(location, len(last))
        return f"{parent}{slash}{location}" if contains_name else f"{name}: {location}"

    def find_numbers(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of the samples with these `describe` names. Raise `UserError` for an
        unknown name."""
        targets = set(names)
        found = {
            name: number
            for number in range(self.first[-1])
            if (name := self.describe(number)) in targets
        }
        if missing := [name for name in names if name not in found]:
            raise UserError(
                f"'{missing[0]}' is not a sample of this data; use the run's data configuration"
            )
        return [found[name] for name in names]


Windows = Sequence[Sequence[EncodedRow]]
"""Samples of each window of a batch; an empty window is padding."""


class WindowDataset:
    """Map-style dataset from the sample numbers of B windows to a batch; `collate` creates it
    without `documents`. An error instead of the numbers stays as it is."""

    def __init__(
        self,
        samples: SampleSets,
        seq_len: int,
        collate: Callable[[Windows, int], Batch],
        vocab_size: int | None,
    ):
        self.samples = samples
        self.seq_len = seq_len
        self.collate = collate
        self.vocab_size = vocab_size

    def __getitem__(self, windows: Sequence[Sequence[int]] | UserError) -> Batch | UserError:
        if isinstance(windows, UserError):
            return windows
        try:
            batch = self.collate(
                [list(map(self._sample, window)) for window in windows], self.seq_len
            )
        except UserError as error:
            return error
        import torch

        documents = np.full((len(windows), max(1, *map(len, windows))), NO_DOCUMENT, np.int64)
        for row, window in zip(documents, windows, strict=True):
            row[: len(window)] = window
        batch["documents"] = torch.from_numpy(documents)
        return batch

    def _sample(self, number: int) -> EncodedRow:
        sample = self.samples.sample(number)
        for part in sample.parts:
            check_ids(
                part.ids,
                self.vocab_size,
                lambda index: f"{self.samples.describe(number)}, token {index + 1:,}",
            )
        return sample


def pack_windows(windows: Windows, seq_len: int) -> Batch:
    """Pack the first sequence of each sample by `pack_samples` into a batch of windows of `seq_len`
    tokens."""
    return to_batch(
        [pack_samples([sample.parts[0] for sample in window], seq_len) for window in windows]
    )


def pack_samples(samples: Sequence[EncodedSample], seq_len: int) -> dict[str, Array]:
    """Pack samples into one window of `seq_len` positions, each as a separate document. Return
    `input`, `labels` and `positions`, each (seq_len,), and `n_tokens`. The rest of the window is
    padding: a separate document with ignored labels."""
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
    return {**window, "n_tokens": np.array(start)}

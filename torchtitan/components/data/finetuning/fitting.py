"""Samples as sequences of a given length hold them: those that are too long are left out, cut, or refused."""

import copy
from collections.abc import Iterator
from typing import Literal

import numpy as np

from torchtitan.components.data.finetuning.policies import Dropped, Policy, Report, Tally, none_left
from torchtitan.components.data.finetuning.row_encoders import EncodedRow
from torchtitan.components.data.finetuning.sample_cache import SampleCache
from torchtitan.components.data.packing import Array
from torchtitan.tools.errors import UserError

MANY_TOO_LONG = 0.01
"""The share of a data set's rows from which on it is a warning that they are dropped as too long."""

TooLong = Literal["drop", "truncate_left", "truncate_right", "error"]
"""`truncate_left` keeps a sample's end, `truncate_right` its beginning."""


class FittedSamples:
    """The samples of a cache that fit, as they are or cut.

    Args:
        cache: all samples.
        max_length: most tokens of each sequence of a sample.
        too_long: what to do with samples that have a longer one. All sequences of one are cut by the same number of
            tokens, so that what begins alike still does.
        untrained: what to do with samples none of whose tokens is predicted once they are cut. None: samples are only
            cut where all that is predicted stays, since what is compared must be whole; others are left out.
        name: the data set's, for messages.

    Raises:
        UserError: a policy is `error` and finds something, or no sample is left.
    """

    def __init__(self, cache: SampleCache, max_length: int, too_long: TooLong, untrained: Policy | None, name: str):
        self._cache, self._too_long, self._untrained = cache, too_long, untrained
        self.max_length = max_length
        self.report: Report = copy.deepcopy(cache.report)
        """The cache's, and what became of samples that are too long."""
        lengths = cache.lengths
        self.all_lengths: Array = lengths
        """Tokens of the longest sequence of each sample of the cache, those included that are left out or cut."""
        keep = np.ones(len(lengths), bool)
        for index in np.flatnonzero(lengths > max_length).tolist():
            keep[index] = self._fit(index, int(lengths[index]))
        self._indices = np.flatnonzero(keep)
        self.lengths: Array = np.minimum(lengths[keep], max_length)
        """Tokens of the longest sequence of each sample, (n_samples,)."""
        if not len(self._indices):
            raise none_left(name, self.report, self.warnings())

    @property
    def n_samples(self) -> int:
        """Number of samples that fit."""
        return len(self._indices)

    def sample(self, index: int) -> EncodedRow:
        """The sample with a number from 0, in the order of the rows."""
        return self._cut(self._cache.sample(int(self._indices[index])))

    def describe(self, index: int) -> str:
        """Where the sample's row is: `my.jsonl:17`."""
        return self._cache.describe(int(self._indices[index]))

    def warnings(self) -> Iterator[str]:
        """What somebody has to know before training on the samples."""
        if unread := self.report.unread:
            plural = len(unread) > 1
            yield (
                f"the column{'s' * plural} {', '.join(unread)} {'are' if plural else 'is'} not read (format "
                f"{self.report.format}), though the name{'s' * plural} may matter to training; --dataloader.format can "
                "name a function that reads the rows otherwise"
            )
        dropped = self.report.dropped.get("too_long", Tally()).count
        if dropped > MANY_TOO_LONG * self.report.rows:
            yield (
                f"{dropped:,} of {self.report.rows:,} rows ({dropped / self.report.rows:.1%}) are dropped because they "
                f"have more than {self.max_length:,} tokens: raise --training.seq_len"
                + (f", or cut them by --dataloader.too_long {self._cuts}" if self._too_long == "drop" else "")
            )

    @property
    def _cuts(self) -> str:
        """The choices of `too_long` that cut samples."""
        return "truncate_left" if self._untrained is None else "truncate_left or truncate_right"

    def _fit(self, index: int, length: int) -> bool:
        """Count a sample that is too long; whether it is kept."""
        where, whole, report = self._cache.describe(index), self._cache.sample(index), self.report
        holds = f"{self.max_length:,} fit" if self._untrained is None else f"a window holds {self.max_length:,}"
        size = f"{length:,} tokens, {holds}"
        left = self._shortened(whole, where, size)
        report.tokens -= whole.n_tokens
        report.trained_tokens -= whole.n_trained
        if isinstance(left, Dropped):
            report.kept -= 1
            report.drop(where, left)
            return False
        report.tokens += left.n_tokens
        report.trained_tokens += left.n_trained
        report.truncated.add(where, size)
        return True

    def _shortened(self, whole: EncodedRow, where: str, size: str) -> EncodedRow | Dropped:
        """A sample that is too long, cut, or why it is left out."""
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

"""Samples as windows of a given size hold them: those that are too long are left out, cut, or refused."""

import copy
from typing import Literal

import numpy as np

from torchtitan.components.data.finetuning.chat_encoding import EncodedSample
from torchtitan.components.data.finetuning.policies import Dropped, Policy, Report, n_trained
from torchtitan.components.data.finetuning.sample_cache import SampleCache
from torchtitan.components.data.packing import Array
from torchtitan.tools.errors import UserError

TooLong = Literal["drop", "truncate_left", "truncate_right", "error"]
"""`truncate_left` keeps a sample's end, `truncate_right` its beginning."""


class FittedSamples:
    """The samples of a cache that fit into a window.

    Args:
        cache: all samples.
        seq_len: positions of a window. A sample of n tokens takes n - 1: the last one has nothing to predict.
        too_long: what to do with samples that take more.
        untrained: what to do with samples none of whose tokens is predicted once they are cut.
        name: the data set's, for messages.

    Raises:
        UserError: a policy is `error` and finds something, or no sample is left.
    """

    def __init__(self, cache: SampleCache, seq_len: int, too_long: TooLong, untrained: Policy, name: str):
        self._cache = cache
        self._max_length = seq_len + 1
        self._too_long = too_long
        self.report: Report = copy.deepcopy(cache.report)
        """The cache's, and what became of samples that are too long."""
        lengths = cache.lengths
        self.all_lengths: Array = lengths
        """Tokens of each sample of the cache, those included that are left out or cut because they are too long."""
        keep, n_trained_of = np.ones(len(lengths), bool), np.array(cache.n_trained)
        for index in np.flatnonzero(lengths > self._max_length).tolist():
            keep[index], n_trained_of[index] = self._fit(index, int(lengths[index]), untrained)
        self._indices = np.flatnonzero(keep)
        self.lengths: Array = np.minimum(lengths[keep], self._max_length)
        """Tokens of each sample, (n_samples,)."""
        self.report.kept, self.report.tokens = len(self._indices), int(self.lengths.sum())
        self.report.trained_tokens = int(n_trained_of[keep].sum())
        if not self.report.kept:
            raise UserError("\n".join([f"no row of {name} is left to train on", *self.report.lines()]))

    @property
    def n_samples(self) -> int:
        """Number of samples that fit."""
        return len(self._indices)

    def sample(self, index: int) -> EncodedSample:
        """The sample with a number from 0, in the order of the rows."""
        return self._cut(self._cache.sample(int(self._indices[index])))

    def describe(self, index: int) -> str:
        """Where the sample's row is: `my.jsonl:17`."""
        return self._cache.describe(int(self._indices[index]))

    def _fit(self, index: int, length: int, untrained: Policy) -> tuple[bool, int]:
        """Count a sample that is too long: whether it is kept, and with how many predicted tokens."""
        where, size = self._cache.describe(index), f"{length:,} tokens, a window holds {self._max_length:,}"
        if self._too_long == "error":
            raise UserError(f"{where}: {size}; --dataloader.too_long can also be drop, truncate_left or truncate_right")
        if self._too_long == "drop":
            self.report.drop(where, Dropped("too_long", size))
            return False, 0
        left = n_trained(self._cut(self._cache.sample(index)))
        if left == 0:
            why = f"none of its tokens is trained once it is cut ({size})"
            if untrained == "error":
                raise UserError(f"{where}: {why}; --dataloader.untrained drop leaves such rows out")
            self.report.drop(where, Dropped("untrained", why))
            return False, 0
        self.report.truncated.add(where, size)
        return True, left

    def _cut(self, sample: EncodedSample) -> EncodedSample:
        kept = slice(-self._max_length, None) if self._too_long == "truncate_left" else slice(self._max_length)
        return sample._replace(ids=sample.ids[kept], trained=sample.trained[kept])

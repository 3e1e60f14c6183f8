"""Examples as sequences of a given length hold them: those that are too long are left out, cut, or refused."""

import copy
from typing import Literal

import numpy as np

from torchtitan.components.data.finetuning.chat_encoding import EncodedSample
from torchtitan.components.data.finetuning.examples import Example, ExampleCache
from torchtitan.components.data.finetuning.policies import Dropped, Report
from torchtitan.components.data.packing import Array
from torchtitan.tools.errors import UserError

TooLongExample = Literal["drop", "truncate_left", "error"]
"""`truncate_left` keeps the end; only of prompts, since what is compared must be whole."""


class FittedExamples:
    """The examples of a cache no part of which is too long.

    Args:
        cache: all examples.
        max_length: most tokens of a part.
        too_long: what to do with examples that have a longer one. All parts of one are cut by the same number of
            tokens, so that they still begin alike; one that would lose more than untrained tokens is left out.
        name: the data set's, for messages.

    Raises:
        UserError: the policy is `error` and there is one, or no example is left.
    """

    def __init__(self, cache: ExampleCache, max_length: int, too_long: TooLongExample, name: str):
        self._cache = cache
        self._max_length = max_length
        self.report: Report = copy.deepcopy(cache.report)
        """The cache's, and what became of examples that are too long."""
        lengths = cache.lengths
        self.all_lengths: Array = lengths
        """Tokens of the longest part of each example of the cache, those included that are left out or cut."""
        keep = np.ones(len(lengths), bool)
        for index in np.flatnonzero(lengths > max_length).tolist():
            keep[index] = self._fit(index, int(lengths[index]), too_long)
        self._indices: Array = np.flatnonzero(keep)
        self._cuts: Array = np.maximum(lengths - max_length, 0)[keep]
        if not len(self._indices):
            raise UserError("\n".join([f"no row of {name} is left", *self.report.lines()]))

    @property
    def n_samples(self) -> int:
        """Number of examples that fit."""
        return len(self._indices)

    def example(self, index: int) -> Example:
        """The example with a number from 0, in the order of the rows, each part at most `max_length` tokens."""
        return _cut(self._cache.example(int(self._indices[index])), int(self._cuts[index]))

    def answer(self, index: int) -> str | None:
        """The example's reference answer."""
        return self._cache.answer(int(self._indices[index]))

    def describe(self, index: int) -> str:
        """Where the example's row is: `my.jsonl:17`."""
        return self._cache.describe(int(self._indices[index]))

    def _fit(self, index: int, length: int, too_long: TooLongExample) -> bool:
        """Count an example that is too long; whether it is kept."""
        where, size = self._cache.describe(index), f"{length:,} tokens, {self._max_length:,} fit"
        if too_long == "error":
            raise UserError(f"{where}: {size}; --dataloader.too_long can also be drop or truncate_left")
        example = self._cache.example(index)
        n_tokens = sum(len(part.ids) for part in example.parts)
        n_trained = sum(int(part.trained[1:].sum()) for part in example.parts)
        cut = length - self._max_length
        if too_long == "truncate_left" and all(cut <= _removable(part) for part in example.parts):
            self.report.truncated.add(where, size)
            self.report.tokens -= cut * len(example.parts)
            return True
        why = f"{size}, and its answers alone are too long" if too_long == "truncate_left" else size
        self.report.drop(where, Dropped("too_long", why))
        self.report.kept -= 1
        self.report.tokens -= n_tokens
        self.report.trained_tokens -= n_trained
        return False


def _removable(part: EncodedSample) -> int:
    """How many tokens can be cut off the left: those that are not trained, but one to predict from."""
    n_untrained = int(np.argmax(part.trained)) if part.trained.any() else len(part.ids)
    return n_untrained - 1


def _cut(example: Example, n_tokens: int) -> Example:
    parts = (part._replace(ids=part.ids[n_tokens:], trained=part.trained[n_tokens:]) for part in example.parts)
    return Example(tuple(parts), example.answer)

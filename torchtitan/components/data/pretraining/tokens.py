"""Tokens of documents in a fixed order, which the loader reads at any position."""

import bisect
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from torchtitan.components.data.disk_cache import evenly_spaced
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.report import Report
from torchtitan.components.data.sources.source import LocalData

BYTES_PER_TOKEN = 4
"""Mean length of a token in English text with large vocabularies."""


class Tokens(LocalData, ABC):
    """A stream of token ids, divided into documents."""

    key: str
    """Equal keys mean equal documents and tokens."""
    n_tokens: int
    """Number of tokens, including BOS and EOS."""
    format = "text"
    """Format in the report."""
    is_remote: bool = False
    """True if reading takes long, so that windows should be read ahead."""
    sources: Sequence[tuple[str, Report]] = ()
    """Name and counts of each source, if recorded."""

    def n_bytes(self) -> int:
        """Return about how many bytes the text has, to compare with the files of a stream."""
        return self.n_tokens * BYTES_PER_TOKEN

    @abstractmethod
    def tokens(self, start: int, stop: int) -> Array:
        """Return the token ids from `start` up to `stop` or the end of the data, int64."""

    @abstractmethod
    def starts(self, start: int, stop: int) -> Array:
        """Return the starts of documents in [start, stop), relative to `start`; the end of the data
        is not a start."""

    @abstractmethod
    def locate(self, token: int) -> tuple[str, int]:
        """Return the place of a token's document: `a.jsonl, document`, and its number there, from
        1."""

    def describe(self, first: int, last: int) -> str:
        """Describe the documents from one token to another."""
        (place, begin), (last_place, end) = self.locate(first), self.locate(last)
        if place != last_place:
            return f"{place} {begin:,} to {last_place} {end:,}"
        return f"{place} {begin:,}" if begin == end else f"{place}s {begin:,}-{end:,}"

    def describe_token(self, token: int) -> str:
        """Describe the place of a token: its file, and where it is in the file."""
        return self.describe(token, token)

    @abstractmethod
    def lengths(self) -> Array:
        """Return the tokens of each document, (n,); of joined streams, the documents of a sample of
        them."""

    def report(self) -> Report:
        """Return the counts of documents and tokens, estimated if they are not recorded and
        `lengths` is a sample."""
        if self.sources:
            return Report.total(report for _, report in self.sources)
        lengths = self.lengths()
        n_sampled = int(lengths.sum())
        scale = self.n_tokens / max(1, n_sampled)
        n_documents = round(len(lengths) * scale)
        n_nonempty = round(int((lengths > 0).sum()) * scale)
        name = self.format if n_sampled == self.n_tokens else f"{self.format}, about"
        # The first token of a document is not predicted.
        return Report(
            format=name,
            rows=n_documents,
            kept=n_documents,
            samples=n_documents,
            tokens=self.n_tokens,
            trained_tokens=self.n_tokens - n_nonempty,
        )


class Numbers(Protocol):
    """An array of numbers, or a file that is read in slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> Array: ...


class ArrayTokens(Tokens):
    """Tokens in an array.

    Args:
        key: see `Tokens`.
        tokens: token ids, (n_tokens,).
        offsets: start of each document, and the total, int64 (n_documents + 1,).
        names: names of the parts that the documents come from.
        documents_per_part: number of documents in each part.
    """

    def __init__(
        self,
        key: str,
        tokens: Numbers,
        offsets: Array,
        names: Sequence[str],
        documents_per_part: Sequence[int],
    ):
        self.key = key
        self.n_tokens = len(tokens)
        self.names = names
        self.place = key
        """Location of the tokens, for messages."""
        self._tokens, self._offsets = tokens, offsets
        self._first_documents = [0, *itertools.accumulate(documents_per_part)]

    def lengths(self) -> Array:
        return np.diff(self._offsets)

    def tokens(self, start: int, stop: int) -> Array:
        return np.array(self._tokens[start:stop], np.int64)

    def starts(self, start: int, stop: int) -> Array:
        low, high = np.searchsorted(self._offsets[:-1], (start, min(stop, self.n_tokens)))
        return np.array(self._offsets[low:high]) - start

    def describe_token(self, token: int) -> str:
        return f"{self.place}, token {token + 1:,} ({self.describe(token, token)})"

    def locate(self, token: int) -> tuple[str, int]:
        document = int(np.searchsorted(self._offsets, token, side="right")) - 1
        part = bisect.bisect_right(self._first_documents, document) - 1
        return f"{self.names[part]}, document", document - self._first_documents[part] + 1


class JoinedTokens(Tokens):
    """Streams one after the other, each opened when it is read.

    Args:
        key: see `Tokens`.
        first_tokens: position of each stream's first token, ascending, int64 (n,).
        n_tokens: tokens of all streams.
        open_stream: opens a stream by its index, and can be pickled. Raise `UserError` if it is
            damaged.
    """

    format = "tokens"

    def __init__(
        self, key: str, first_tokens: Array, n_tokens: int, open_stream: Callable[[int], Tokens]
    ):
        self._arguments: tuple[object, ...] = (key, first_tokens, n_tokens, open_stream)
        self.key = key
        self._first_tokens = first_tokens
        self.n_tokens = n_tokens
        # an open one may have files mapped into memory
        self._stream = functools.lru_cache(128)(open_stream)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._arguments

    def _spans(self, start: int, stop: int) -> Iterator[tuple[Tokens, int, int, int]]:
        """Yield the streams that overlap a range, with the position of the first token of the
        stream, and the range in it."""
        index = int(np.searchsorted(self._first_tokens, start, side="right")) - 1
        stop = min(stop, self.n_tokens)
        while start < stop:
            stream, first = self._stream(index), int(self._first_tokens[index])
            end = min(stop, first + stream.n_tokens)
            yield stream, first, start - first, end - first
            start, index = end, index + 1

    def tokens(self, start: int, stop: int) -> Array:
        return np.concatenate(
            [stream.tokens(low, high) for stream, _, low, high in self._spans(start, stop)]
        )

    def starts(self, start: int, stop: int) -> Array:
        spans = self._spans(start, stop)
        return np.concatenate(
            [stream.starts(low, high) + first + low - start for stream, first, low, high in spans]
        )

    def describe_token(self, token: int) -> str:
        [(stream, _, place, _)] = self._spans(token, token + 1)
        return stream.describe_token(place)

    def locate(self, token: int) -> tuple[str, int]:
        [(stream, _, place, _)] = self._spans(token, token + 1)
        return stream.locate(place)

    def lengths(self) -> Array:
        """Return the document lengths of at most 16 evenly spaced streams in tokens, (n,)."""
        chosen = evenly_spaced(len(self._first_tokens), 16)
        return np.concatenate([self._stream(index).lengths() for index in chosen])

"""Near duplicates by MinHash: documents that share many n-grams of tokens.

The least values of `N_HASHES` hash functions over a document's n-grams are its signature; two
documents agree in each with a probability that equals the similarity of their n-grams (Jaccard's:
the shared ones over all of both; Broder 1997). Signatures are cut into bands: documents with an
equal band are near duplicates (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section
3.4).
"""

import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torchtitan.components.data.plan.sampler import Array
from torchtitan.tools.errors import require

Hashes = NDArray[np.uint64]

NGRAM = 5
"""Tokens of an n-gram. Shorter documents have no near duplicates."""

N_HASHES = 128
_FOUND = 0.9
"""Least probability with which documents of the chosen similarity are found."""

_BLOCK = 1 << 16
"""N-grams whose hashes are computed at a time: they stay in the processor's cache."""

_MOST = np.uint32(2**32 - 1)
_FACTORS = np.random.PCG64(0).random_raw(2 * N_HASHES + 1) | np.uint64(1)
"""Odd factors and summands of the hash functions; the raw numbers of PCG64 never change."""


@dataclass(frozen=True)
class Bands:
    """Search for documents of at least this similarity. Raise `UserError` unless it is between 0.7
    and 1."""

    similarity: float

    def __post_init__(self) -> None:
        is_valid = 0.7 <= self.similarity < 1
        require(is_valid, "--near_duplicates", self.similarity, "at least 0.7 and below 1")

    @cached_property
    def n_rows(self) -> int:
        """Values of a band: as many as possible, so that few documents below the similarity are
        found."""
        return max(
            n for n in range(1, N_HASHES) if _probability(self.similarity, n) >= _FOUND or n == 1
        )

    @cached_property
    def n_bands(self) -> int:
        return N_HASHES // self.n_rows

    def probability(self, similarity: float) -> float:
        """Return the probability with which two documents of a similarity have an equal band."""
        return _probability(similarity, self.n_rows)

    def seconds_per_token(self) -> float:
        """Return the processor seconds that a token takes, measured."""
        n = 2 * _BLOCK
        began = time.process_time()
        self.of(np.arange(n), np.arange(0, n + 1, 256))
        return (time.process_time() - began) / n

    def of(self, tokens: Array, offsets: Array) -> Hashes:
        """Return the bands of documents as hashes, (bands, n): 0 for documents without n-grams.

        Args:
            tokens: ids of all documents.
            offsets: start of each document, and the end, (n + 1,).
        """
        signatures = _signatures(tokens, offsets)
        rows = signatures[:, : self.n_bands * self.n_rows].astype(np.uint64)
        bands = rows.reshape(-1, self.n_bands, self.n_rows).transpose(2, 1, 0)
        found = np.zeros(bands.shape[1:], np.uint64)
        for row in bands:
            found = _mixed(found * _FACTORS[-1] + row)
        found[found == 0] = 1
        found[:, np.diff(offsets) < NGRAM] = 0
        return found


def _probability(similarity: float, n_rows: int) -> float:
    return 1 - (1 - similarity**n_rows) ** (N_HASHES // n_rows)


def _signatures(tokens: Array, offsets: Array) -> NDArray[np.uint32]:
    """Return the signatures of documents, (n, N_HASHES)."""
    least = np.full((len(offsets) - 1, N_HASHES), _MOST)
    n_starts = len(tokens) - NGRAM + 1
    for first in range(0, n_starts, _BLOCK):
        starts = np.arange(first, min(first + _BLOCK, n_starts))
        document = np.searchsorted(offsets, starts, side="right") - 1
        is_inside = starts + NGRAM <= offsets[document + 1]
        document = document[is_inside]
        if not len(document):
            continue
        hashes = _ngrams(tokens[first : starts[-1] + NGRAM])[is_inside]
        begins = np.flatnonzero(np.diff(document, prepend=-1))
        own = document[begins]
        for number in range(N_HASHES):
            factor, summand = _FACTORS[2 * number : 2 * number + 2]
            values = ((hashes * factor + summand) >> np.uint64(32)).astype(np.uint32)
            least[own, number] = np.minimum(least[own, number], np.minimum.reduceat(values, begins))
    return least


def _ngrams(tokens: Array) -> Hashes:
    """Return a hash of each n-gram, (len(tokens) - NGRAM + 1,)."""
    ids, n = tokens.astype(np.uint64), len(tokens) - NGRAM + 1
    hashes = np.zeros(n, np.uint64)
    for place in range(NGRAM):
        hashes = hashes * _FACTORS[-1] + ids[place : place + n] + np.uint64(1)
    return _mixed(hashes)


def _mixed(values: Hashes) -> Hashes:
    """Mix the bits of numbers (the finalizer of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def repeated(hashes: Hashes, order: Array) -> Array:
    """Return the indices of the hashes that equal another one, 0 aside, except the first of these
    in `order`. Both are (n,)."""
    sorting = np.lexsort((order, hashes))
    in_order = hashes[sorting]
    repeats = (in_order[1:] == in_order[:-1]) & (in_order[1:] != 0)
    indices: Array = sorting[1:][repeats]
    return indices

"""Where a `PretrainDataLoader` takes its batches from: the interface, and the feed from the token cache."""

import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from torchtitan.components.data.finetuning.policies import Report
from torchtitan.components.data.packing import (
    NO_DOCUMENT,
    Array,
    Batch,
    collate,
    count_windows,
    filler,
    pack,
    permute,
)
from torchtitan.components.data.summary import DataSummary, SetSummary
from torchtitan.components.data.token_cache import TokenCache
from torchtitan.components.data.workers import Workers


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How samples are shaped and who takes which; `local_batch_size` samples per batch of each data-parallel rank."""

    seq_len: int
    local_batch_size: int
    dp_rank: int
    dp_world_size: int
    num_workers: int
    document_mask: bool

    @property
    def global_batch_size(self) -> int:
        """Samples that all ranks together take at a time."""
        return self.local_batch_size * self.dp_world_size


class Feed(ABC):
    """An iterator over one rank's batches whose position can be saved and set.

    `fingerprint` is equal for two feeds whose positions mean the same samples.
    """

    fingerprint: str
    n_samples: int | None = None
    """Samples of all epochs over all ranks; None: not known, or without end."""

    @property
    @abstractmethod
    def exhausted(self) -> bool:
        """Whether `next` has found no more samples of this rank."""

    @abstractmethod
    def __next__(self) -> Batch:
        """The next batch; `StopIteration` where every rank ends after the same number of batches."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch handed out, JSON-ready."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position of a feed with the same fingerprint."""

    @abstractmethod
    def describe(self, first: int, last: int) -> str:
        """The documents with the numbers `first` to `last` in words."""

    def summary(self, name: str, n_samples: int) -> DataSummary | None:
        """What is known of the data set `name` for a run that reads `n_samples`; None: nothing, before it is read."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End the worker processes."""


def fingerprint(*parts: Any) -> str:
    """Digest of JSON-ready values."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class PackedDataset(Dataset[Batch]):
    """The batches of one rank as a pure function of their place in the global order of samples.

    Sample `p` of all is, for an epoch of n windows, window `permute(p % n)` with the permutation of epoch `p // n`.
    """

    def __init__(self, cache: TokenCache, layout: Layout, *, shuffle: bool, seed: int, n_samples: int | None):
        self.cache = cache
        self.layout = layout
        self.shuffle = shuffle
        self.seed = seed
        self.n_samples = n_samples
        self.n_windows = count_windows(cache.n_tokens, layout.seq_len)

    def __getitem__(self, position: int) -> Batch:
        """The batch of the samples from global position `position` on; those behind `n_samples` predict nothing."""
        return collate([self._sample(position + i) for i in range(self.layout.local_batch_size)])

    def _sample(self, position: int) -> tuple[dict[str, Array], tuple[int, int]]:
        seq_len, document_mask = self.layout.seq_len, self.layout.document_mask
        if self.n_samples is not None and position >= self.n_samples:
            return filler(seq_len, document_mask=document_mask), (NO_DOCUMENT, NO_DOCUMENT)
        epoch, index = divmod(position, self.n_windows)
        window = permute(index, self.n_windows, self.seed, epoch) if self.shuffle else index
        start = window * seq_len
        tokens = self.cache.tokens(start, start + seq_len + 1)
        starts = self.cache.starts(start, start + len(tokens))
        documents = self.cache.document_at(start), self.cache.document_at(start + len(tokens) - 1)
        return pack(tokens, starts, seq_len, document_mask=document_mask), documents


class CachedFeed(Feed):
    """Batches from the token cache. The position is one number: how many samples all ranks together have taken.

    So it can be continued by any number of ranks and workers, with batches of any size, at once.
    """

    def __init__(self, cache: TokenCache, layout: Layout, *, shuffle: bool, seed: int, epochs: int | None):
        self._cache = cache
        self._layout = layout
        self._shuffle = shuffle
        self._seed = seed
        self._position = 0
        self._exhausted = False
        self._workers: Workers | None = None
        self.n_samples = None if epochs is None else epochs * count_windows(cache.n_tokens, layout.seq_len)
        self.fingerprint = fingerprint(cache.key, layout.seq_len, shuffle)

    @property
    def exhausted(self) -> bool:
        return self._exhausted

    def __next__(self) -> Batch:
        if self.n_samples is not None and self._position >= self.n_samples:
            self._exhausted = True
            raise StopIteration
        if self._workers is None:
            dataset = PackedDataset(
                self._cache, self._layout, shuffle=self._shuffle, seed=self._seed, n_samples=self.n_samples
            )
            self._workers = Workers(dataset, sampler=self._positions(), num_workers=self._layout.num_workers)
        batch: Batch = next(self._workers)
        self._position += self._layout.global_batch_size
        if self.n_samples is not None:
            self._position = min(self._position, self.n_samples)
        return batch

    def _positions(self) -> Iterable[int]:
        """Where this rank's batches begin, from the current position to the end, as many on every rank."""
        stride = self._layout.global_batch_size
        first = self._position + self._layout.dp_rank * self._layout.local_batch_size
        if self.n_samples is None:
            return itertools.count(first, stride)
        n_batches = -(-(self.n_samples - self._position) // stride)
        return range(first, first + n_batches * stride, stride)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        self._exhausted = False
        # The seed of the saved order: with another, some samples of this epoch would come twice and some never.
        self._position, self._seed = state["position"], state["seed"]

    def describe(self, first: int, last: int) -> str:
        return self._cache.describe(first, last)

    def summary(self, name: str, n_samples: int) -> DataSummary:
        cache, seq_len = self._cache, self._layout.seq_len
        lengths = cache.lengths
        # The first token of a text has nothing to be predicted from.
        n_firsts = int((lengths > 0).sum()) if self._layout.document_mask else 1
        n_documents = cache.n_documents
        report = Report("text", n_documents, n_documents, cache.n_tokens, cache.n_tokens - n_firsts)
        per_epoch = count_windows(cache.n_tokens, seq_len)
        return DataSummary(
            sets=[SetSummary(name=name, report=report, lengths=lengths, epochs=n_samples / per_epoch, max_epochs=None)],
            max_length=seq_len + 1,
            windows_per_epoch=per_epoch,
            packing_efficiency=(cache.n_tokens - 1) / (per_epoch * seq_len),
            follows_seed=True,
        )

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

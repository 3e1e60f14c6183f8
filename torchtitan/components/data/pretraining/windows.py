"""Windows over a stream of tokens, their order, and their batches.

The concatenated documents of a dataset are one stream of tokens. Window `i` covers the `seq_len` + 1 tokens from `i *
seq_len` on. Neighboring windows overlap by one, so every token except the first is a label exactly once.
"""

import dataclasses
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from torchtitan.components.data.base import NO_DOCUMENT, Batch, Layout, to_batch
from torchtitan.components.data.disk_cache import digest_of
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.pretraining.tokens import Tokens
from torchtitan.components.data.report import DataSummary, SetSummary
from torchtitan.components.data.workers import Workers
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.tools.errors import UserError

Sample = tuple[dict[str, Array], tuple[int, int]]
"""A row of a batch, with the numbers of its first and last document."""

SAMPLES_READ_AHEAD = 16
"""Approximate number of samples of remote data that a process keeps in memory for the next batches."""

_MASK = (1 << 64) - 1
_ROUNDS = 6


def count_windows(n_tokens: int, seq_len: int) -> int:
    """Return the number of windows of `seq_len` labels in `n_tokens` tokens, including a partial last one."""
    return max(0, -(-(n_tokens - 1) // seq_len))


def permute(index: int, size: int, *key: int) -> int:
    """Return the image of `index` under a pseudo-random permutation of `range(size)` chosen by `key`.

    Needs no memory: a Feistel network permutes a range of at least `size` with an even number of bits, and is repeated
    until the result is in range ("cycle walking"; Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    2002). The domain has at most 4 * `size` elements, so the mean number of passes is below 4.
    """
    assert 0 <= index < size
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    half_mask = (1 << half_bits) - 1
    round_keys = _round_keys(key)
    while True:
        left, right = index >> half_bits, index & half_mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & half_mask)
        index = left << half_bits | right
        if index < size:
            return index


def _round_keys(key: tuple[int, ...]) -> list[int]:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]


def _mix(value: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014): each input bit affects all output bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def pack(tokens: Array, starts: Array, seq_len: int, *, document_mask: bool) -> dict[str, Array]:
    """Create the sample of one window, with `seq_len` positions.

    Args:
        tokens: the window's 2 to `seq_len + 1` tokens; fewer than `seq_len + 1` only at the end of the data.
        starts: indices in `tokens` of document starts, with or without index 0.
        document_mask: restart positions at each document, and do not predict a document's first token from the previous
            document. False: the window is one text without positions.

    Returns:
        `input`, `labels` and, with document masking, `positions`, each (seq_len,). The rest of a short window is
            padding: a separate document with ignored labels.
    """
    n_inputs = len(tokens) - 1
    assert 1 <= n_inputs <= seq_len
    inputs = np.zeros(seq_len, np.int64)
    inputs[:n_inputs] = tokens[:-1]
    labels = np.full(seq_len, IGNORE_INDEX, np.int64)
    labels[:n_inputs] = tokens[1:]
    if not document_mask:
        return {"input": inputs, "labels": labels}
    labels[starts[starts > 0] - 1] = IGNORE_INDEX
    origin = np.zeros(seq_len, np.int64)
    inside = np.append(starts[starts < n_inputs], n_inputs) if n_inputs < seq_len else starts[starts < seq_len]
    origin[inside] = inside
    return {"input": inputs, "labels": labels, "positions": np.arange(seq_len) - np.maximum.accumulate(origin)}


def padding_sample(seq_len: int, *, document_mask: bool) -> Sample:
    """Return a sample without labels, to fill the last batch."""
    sample = {"input": np.zeros(seq_len, np.int64), "labels": np.full(seq_len, IGNORE_INDEX, np.int64)}
    if document_mask:
        sample["positions"] = np.arange(seq_len)
    return sample, (NO_DOCUMENT, NO_DOCUMENT)


def collate(samples: Iterable[Sample]) -> Batch:
    samples = list(samples)
    batch = to_batch([sample for sample, _ in samples])
    batch["documents"] = torch.tensor([documents for _, documents in samples])
    return batch


class BatchIterator(ABC):
    """Iterator over one rank's batches with a position that can be saved and restored.

    Args:
        fingerprint: JSON-serializable values that are equal if positions refer to the same samples.
        n_samples: samples of all epochs over all ranks; None: unknown or endless.
    """

    def __init__(self, layout: Layout, fingerprint: Sequence[Any], n_samples: int | None = None):
        self.fingerprint = digest_of(fingerprint)
        self.n_samples = n_samples
        self.exhausted = False
        """True if `next` has found no further samples of this rank."""
        self._layout = layout
        self._workers: Workers | None = None

    @abstractmethod
    def __next__(self) -> Batch:
        """Return the next batch. Raise `StopIteration` if all ranks end after the same number of batches."""

    def set_seq_len(self, seq_len: int, longest: int) -> None:
        """Change the length of windows, see `BaseDataLoader.set_seq_len`."""
        raise UserError("--training.seq_len_schedule: the windows of a stream have one length; use local data")

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch returned, as JSON-serializable values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position saved by an iterator with the same fingerprint."""

    @abstractmethod
    def describe(self, first: int, last: int) -> str:
        """Describe the documents with the numbers `first` to `last`."""

    def summary(self, name: str, n_samples: int) -> DataSummary | None:
        """Summarize the dataset `name` for a run of `n_samples`; None: unknown."""
        return None

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None


class PackedDataset(Dataset[Batch]):
    """Batches of one rank by their position in the global order of tokens. The data is cut into blocks of `block`
    tokens, a multiple of `seq_len`. With n blocks per epoch, block `b` in the order is block `permute(b % n)` of the
    data, with the permutation of epoch `b // n`; its windows follow each other."""

    def __init__(self, cache: Tokens, layout: Layout, *, block: int, shuffle: bool, seed: int, n_samples: int | None):
        self.cache, self.layout, self.shuffle, self.seed, self.n_samples = cache, layout, shuffle, seed, n_samples
        self.block, self.n_blocks = block, count_windows(cache.n_tokens, block)
        self._reader: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[Sample]] = {}

    def __getitem__(self, position: int) -> Batch:
        """Return the batch that begins at a global position; samples from `n_samples` on are padding."""
        seq_len = self.layout.seq_len
        positions = range(position, position + self.layout.local_batch_size * seq_len, seq_len)
        return collate(
            [self._read_sample(p) for p in positions] if self.cache.is_remote else map(self._sample, positions)
        )

    def _read_sample(self, position: int) -> Sample:
        """Return a sample of remote data, and read the samples at its place in the next batches in the background."""
        if self._reader is None:  # created in the process that reads
            self._reader = ThreadPoolExecutor(SAMPLES_READ_AHEAD)
        stride = self.layout.global_batch_size * self.layout.seq_len * max(1, self.layout.num_workers)
        n_batches = max(1, SAMPLES_READ_AHEAD // self.layout.local_batch_size)
        for following in range(position, position + n_batches * stride + 1, stride):
            if following not in self._ahead:
                self._ahead[following] = self._reader.submit(self._sample, following)
        return self._ahead.pop(position).result()

    def _sample(self, position: int) -> Sample:
        seq_len, document_mask = self.layout.seq_len, self.layout.document_mask
        epoch, index = divmod(position // self.block, self.n_blocks)
        block = permute(index, self.n_blocks, self.seed, epoch) if self.shuffle else index
        start = block * self.block + position % self.block
        is_beyond = self.n_samples is not None and position >= self.n_samples * seq_len
        if is_beyond or start + 1 >= self.cache.n_tokens:  # the last block of the data is shorter
            return padding_sample(seq_len, document_mask=document_mask)
        tokens = self.cache.tokens(start, start + seq_len + 1)
        starts = self.cache.starts(start, start + len(tokens))
        documents = self.cache.document_at(start), self.cache.document_at(start + len(tokens) - 1)
        return pack(tokens, starts, seq_len, document_mask=document_mask), documents


class CachedBatches(BatchIterator):
    """Batches from the token cache. The position is the number of tokens that all ranks have read in total, in blocks
    and the tokens of an unfinished block; a run with different ranks, workers or batch size can resume from it."""

    def __init__(self, cache: Tokens, layout: Layout, *, shuffle: bool, seed: int):
        self._block = layout.seq_len
        self._cache, self._shuffle, self._seed = cache, shuffle, seed
        self._windows_per_epoch = count_windows(cache.n_tokens, layout.seq_len)
        self._position = 0
        n_samples = None if layout.epochs is None else layout.epochs * self._windows_per_epoch
        super().__init__(layout, [cache.key, layout.seq_len, shuffle], n_samples)

    def __next__(self) -> Batch:
        n_tokens = None if self.n_samples is None else self.n_samples * self._block
        if n_tokens is not None and self._position >= n_tokens:
            self.exhausted = True
            raise StopIteration
        if self._workers is None:
            dataset = PackedDataset(
                self._cache,
                self._layout,
                block=self._block,
                shuffle=self._shuffle,
                seed=self._seed,
                n_samples=self.n_samples,
            )
            self._workers = Workers(dataset, sampler=self._positions(n_tokens), num_workers=self._layout.num_workers)
        batch: Batch = next(self._workers)
        self._position += self._layout.global_batch_size * self._layout.seq_len
        if n_tokens is not None:
            self._position = min(self._position, n_tokens)
        return batch

    def set_seq_len(self, seq_len: int, longest: int) -> None:
        """Change the length of windows; the order of blocks of `longest` tokens stays. Leave out the tokens up to the
        next multiple of `seq_len`."""
        if (self._layout.seq_len, self._block) == (seq_len, longest):
            return
        assert self.n_samples is None and longest % seq_len == 0
        self.close()
        self._layout, self._block = dataclasses.replace(self._layout, seq_len=seq_len), longest
        self._windows_per_epoch = count_windows(self._cache.n_tokens, seq_len)
        self.fingerprint = digest_of([self._cache.key, longest, self._shuffle])
        self._position = -(-self._position // seq_len) * seq_len

    def _positions(self, n_tokens: int | None) -> Iterable[int]:
        seq_len = self._layout.seq_len
        stride = self._layout.global_batch_size * seq_len
        first = self._position + self._layout.dp_rank * self._layout.local_batch_size * seq_len
        if n_tokens is None:
            return itertools.count(first, stride)
        n_batches = -(-(n_tokens - self._position) // stride)
        return range(first, first + n_batches * stride, stride)

    def state_dict(self) -> dict[str, Any]:
        position, offset = divmod(self._position, self._block)
        return {"position": position, "offset": offset, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        self.exhausted = False
        # With a different seed, samples of this epoch would be repeated or skipped.
        self._position, self._seed = state["position"] * self._block + state.get("offset", 0), state["seed"]

    def describe(self, first: int, last: int) -> str:
        return self._cache.describe(first, last)

    def summary(self, name: str, n_samples: int) -> DataSummary:
        cache, seq_len, per_epoch = self._cache, self._layout.seq_len, self._windows_per_epoch
        lengths, report = cache.lengths(), cache.report()
        if not self._layout.document_mask:
            report.trained_tokens = cache.n_tokens - 1  # only the first token of the whole text is not predicted
        return DataSummary(
            sets=[SetSummary(name=name, report=report, lengths=lengths, epochs=n_samples / per_epoch, max_epochs=None)],
            sources=cache.sources,
            max_length=seq_len + 1,
            windows_per_epoch=per_epoch,
            packing_efficiency=(cache.n_tokens - 1) / (per_epoch * seq_len),
            follows_seed=True,
        )

"""Windows over a stream of tokens, their order, and their batches.

The concatenated documents of a dataset are one stream of tokens. Window `i` covers the `seq_len` +
1 tokens from `i * seq_len` on. Neighboring windows overlap by one, so every token except the first
is a label exactly once.
"""

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NotRequired, TypedDict, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from torchtitan.components.data.base import NO_DOCUMENT, Batch, Layout, check_ids, to_batch
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.pretraining.order import BlockOrder
from torchtitan.components.data.pretraining.tokens import Tokens
from torchtitan.components.data.report import DataSummary, SetSummary
from torchtitan.components.data.workers import Workers
from torchtitan.components.losses.labels import IGNORE_INDEX
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import UserError

Arrays = dict[str, Array]
"""Values of a window's positions by name, each (seq_len,), and `n_tokens`; see `pack`."""

Sample = tuple[Arrays, tuple[int, ...]]
"""A row of a batch, with the numbers of its first and last document."""

SAMPLES_READ_AHEAD = 16
"""Approximate number of samples of remote data that a process keeps in memory for the next
batches."""


def count_windows(n_tokens: int, seq_len: int) -> int:
    """Return the number of windows of `seq_len` labels in `n_tokens` tokens, including a partial
    last one."""
    return max(0, -(-(n_tokens - 1) // seq_len))


def pack(tokens: Array, starts: Array, seq_len: int, *, document_mask: bool) -> Arrays:
    """Create the sample of one window, with `seq_len` positions.

    Args:
        tokens: the window's 2 to `seq_len + 1` tokens; fewer than `seq_len + 1` only at the end of
            the data.
        starts: indices in `tokens` of document starts, with or without index 0.
        document_mask: restart positions at each document, and do not predict a document's first
            token from the previous document. False: the window is one text without positions.

    Returns:
        `input`, `labels` and, with document masking, `positions`, each (seq_len,), and `n_tokens`.
        The rest of a short
            window is padding: a separate document with ignored labels.
    """
    n_inputs = len(tokens) - 1
    assert 1 <= n_inputs <= seq_len
    inputs = np.zeros(seq_len, np.int64)
    inputs[:n_inputs] = tokens[:-1]
    labels = np.full(seq_len, IGNORE_INDEX, np.int64)
    labels[:n_inputs] = tokens[1:]
    sample = {"input": inputs, "labels": labels, "n_tokens": np.array(n_inputs)}
    if not document_mask:
        return sample
    labels[starts[starts > 0] - 1] = IGNORE_INDEX
    origin = np.zeros(seq_len, np.int64)
    inside = (
        np.append(starts[starts < n_inputs], n_inputs)
        if n_inputs < seq_len
        else starts[starts < seq_len]
    )
    origin[inside] = inside
    return {**sample, "positions": np.arange(seq_len) - np.maximum.accumulate(origin)}


def padding_sample(seq_len: int, *, document_mask: bool) -> Sample:
    """Return a sample without labels, to fill the last batch."""
    sample = {
        "input": np.zeros(seq_len, np.int64),
        "labels": np.full(seq_len, IGNORE_INDEX, np.int64),
    }
    sample["n_tokens"] = np.array(0)
    if document_mask:
        sample["positions"] = np.arange(seq_len)
    return sample, (NO_DOCUMENT, NO_DOCUMENT)


def collate(samples: Iterable[Sample]) -> Batch:
    samples = list(samples)
    batch = to_batch([sample for sample, _ in samples])
    batch["documents"] = torch.tensor([documents for _, documents in samples])
    return batch


P = TypeVar("P")
"""A position, as JSON-serializable values."""


class BatchIterator(ABC, Generic[P]):
    """Iterator over one rank's batches with a position that can be saved and restored.

    Args:
        fingerprint: JSON-serializable values that are equal if positions refer to the same samples.
        n_samples: samples of all epochs over all ranks; None: unknown or endless.
    """

    _weights: Sequence[float]
    """Present share of each set; empty: none."""

    def __init__(self, layout: Layout, fingerprint: Sequence[object], n_samples: int | None = None):
        self.fingerprint = digest_of(fingerprint)
        self.n_samples = n_samples
        self.exhausted = False
        """True if `next` has found no further samples of this rank."""
        self._layout = layout
        self._workers: Workers | None = None

    @abstractmethod
    def __next__(self) -> Batch:
        """Return the next batch. Raise `StopIteration` if all ranks end after the same number of
        batches."""

    def set_seq_len(self, seq_len: int, longest: int) -> None:
        """Change the length of windows, see `BaseDataLoader.set_seq_len`."""
        raise UserError(
            "--training.seq_len_schedule: the windows of a stream have one length; use local data"
        )

    @property
    def has_weights(self) -> bool:
        """True if the sets have weights, which can be replaced."""
        return bool(self._weights)

    @abstractmethod
    def set_weights(self, weights: Sequence[float]) -> None:
        """Replace the share of each set from the next batch on."""

    @abstractmethod
    def state_dict(self) -> P:
        """Return the position after the last batch returned."""

    @abstractmethod
    def load_state_dict(self, state: P) -> None:
        """Restore a position saved by an iterator with the same fingerprint."""

    @abstractmethod
    def describe(self, first: int, last: int) -> str:
        """Describe the documents with the numbers `first` to `last`."""

    def summary(self, n_samples: int) -> DataSummary | None:
        """Summarize the data for a run of `n_samples`; None: unknown."""
        return None

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None


class PackedDataset(Dataset[Batch | UserError]):
    """Batches of one rank by their position in the global order of tokens, which is made of blocks
    of `block` tokens, a multiple of `seq_len`; the windows of a block follow each other. See
    `BlockOrder`."""

    def __init__(
        self,
        sets: Sequence[Tokens],
        layout: Layout,
        order: BlockOrder,
        *,
        block: int,
        n_samples: int | None,
    ):
        self.sets = sets
        self.layout = layout
        self.order = order
        self.block = block
        self.n_samples = n_samples
        self.is_remote = any(tokens.is_remote for tokens in sets)
        self._reader: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[Sample]] = {}

    def __getitem__(self, position: int) -> Batch | UserError:
        """Return the batch that begins at a global position; samples from `n_samples` on are
        padding. Return an error for data that cannot be read."""
        seq_len = self.layout.seq_len
        positions = range(position, position + self.layout.local_batch_size * seq_len, seq_len)
        read = self._read_sample if self.is_remote else self.sample
        try:
            return collate(list(map(read, positions)))
        except UserError as error:
            return error

    def _read_sample(self, position: int) -> Sample:
        """Return a sample of remote data, and read the samples at its place in the next batches in
        the background."""
        if self._reader is None:  # created in the process that reads
            self._reader = ThreadPoolExecutor(SAMPLES_READ_AHEAD)
        stride = (
            self.layout.global_batch_size * self.layout.seq_len * max(1, self.layout.num_workers)
        )
        n_batches = max(1, SAMPLES_READ_AHEAD // self.layout.local_batch_size)
        for following in range(position, position + n_batches * stride + 1, stride):
            if following not in self._ahead:
                self._ahead[following] = self._reader.submit(self.sample, following)
        return self._ahead.pop(position).result()

    def sample(self, position: int) -> Sample:
        """Return the sample at a global position. Raise `UserError` if it cannot be read."""
        seq_len, document_mask = self.layout.seq_len, self.layout.document_mask
        number, block = self.order.block(position // self.block)
        data, start = self.sets[number], block * self.block + position % self.block
        is_beyond = self.n_samples is not None and position >= self.n_samples * seq_len
        if is_beyond or start + 1 >= data.n_tokens:  # the last block of a set is shorter
            return padding_sample(seq_len, document_mask=document_mask)
        tokens = data.tokens(start, start + seq_len + 1)
        check_ids(tokens, self.layout.vocab_size, lambda index: data.describe_token(start + index))
        starts = data.starts(start, start + len(tokens))
        # Documents are numbered by their tokens here; the numbers are unique over all sets.
        documents = (
            start * len(self.sets) + number,
            (start + len(tokens) - 1) * len(self.sets) + number,
        )
        return pack(tokens, starts, seq_len, document_mask=document_mask), documents


class WeightChange(TypedDict, total=False):
    """The last change of weights: arguments of `BlockOrder`. Empty: none."""

    weights: list[float]
    first: int
    read: list[int]
    last: list[int]


class BlockPosition(TypedDict):
    """A position in the order of blocks. Values that are not required are missing in older ones."""

    position: int
    """Blocks that all ranks have read in total."""
    offset: NotRequired[int]
    """Tokens read of an unfinished block."""
    seed: int
    change: NotRequired[WeightChange]


class CachedBatches(BatchIterator[BlockPosition]):
    """Batches from sets of tokens. The position is the number of tokens that all ranks have read in
    total, in blocks and the tokens of an unfinished block; a run with different ranks, workers or
    batch size can resume from it.

    Args:
        names: names of the sets.
        sets: at least one set.
        weights: share of each set, see `BlockOrder`.
    """

    def __init__(
        self,
        names: Sequence[str],
        sets: Sequence[Tokens],
        layout: Layout,
        *,
        weights: Sequence[float],
        shuffle: bool,
        seed: int,
    ):
        self._names = names
        self._sets = sets
        self._weights = weights
        self._shuffle = shuffle
        self._seed = seed
        self._block, self._position = layout.seq_len, 0
        self._change: WeightChange = {}
        order = self._order(layout.seq_len, {})
        n_samples = None if layout.epochs is None else order.blocks_in(layout.epochs)
        super().__init__(layout, self._identity(), n_samples)

    def _order(self, block: int, change: WeightChange) -> BlockOrder:
        sizes = [count_windows(tokens.n_tokens, block) for tokens in self._sets]
        return BlockOrder(
            sizes,
            change.get("weights", self._weights),
            shuffle=self._shuffle,
            seed=self._seed,
            first=change.get("first", 0),
            read=change.get("read", ()),
            last=change.get("last", ()),
        )

    def _identity(self) -> list[object]:
        return [[tokens.key for tokens in self._sets], self._weights, self._block, self._shuffle]

    def __next__(self) -> Batch:
        n_tokens = None if self.n_samples is None else self.n_samples * self._block
        if n_tokens is not None and self._position >= n_tokens:
            self.exhausted = True
            raise StopIteration
        if self._workers is None:
            order = self._order(self._block, self._change)
            dataset = PackedDataset(
                self._sets, self._layout, order, block=self._block, n_samples=self.n_samples
            )
            self._workers = Workers(
                dataset, sampler=self._positions(n_tokens), num_workers=self._layout.num_workers
            )
        batch = next(self._workers)
        self._position += self._layout.global_batch_size * self._layout.seq_len
        if n_tokens is not None:
            self._position = min(self._position, n_tokens)
        return batch

    def set_seq_len(self, seq_len: int, longest: int) -> None:
        """Change the length of windows; the order of blocks of `longest` tokens stays. Leave out
        the tokens up to the next multiple of `seq_len`."""
        if (self._layout.seq_len, self._block) == (seq_len, longest):
            return
        assert self.n_samples is None and longest % seq_len == 0
        self.close()
        self._layout, self._block = dataclasses.replace(self._layout, seq_len=seq_len), longest
        self.fingerprint = digest_of(self._identity())
        self._position = -(-self._position // seq_len) * seq_len

    def set_weights(self, weights: Sequence[float]) -> None:
        """Replace the weights from the next block on; a begun one is read to its end."""
        self.close()
        first = -(-self._position // self._block)
        order = self._order(self._block, self._change)
        self._change = {
            "weights": list(weights),
            "first": first,
            "read": order.read_before(first),
            "last": list(order.block(first - 1)) if first else [],
        }

    def _positions(self, n_tokens: int | None) -> Iterable[int]:
        seq_len = self._layout.seq_len
        stride = self._layout.global_batch_size * seq_len
        first = self._position + self._layout.dp_rank * self._layout.local_batch_size * seq_len
        if n_tokens is None:
            return itertools.count(first, stride)
        n_batches = -(-(n_tokens - self._position) // stride)
        return range(first, first + n_batches * stride, stride)

    def state_dict(self) -> BlockPosition:
        position, offset = divmod(self._position, self._block)
        state = BlockPosition(position=position, offset=offset, seed=self._seed)
        return {**state, "change": self._change} if self._change else state

    def load_state_dict(self, state: BlockPosition) -> None:
        self.close()
        self.exhausted = False
        # With a different seed, samples of this epoch would be repeated or skipped.
        self._position = state["position"] * self._block + state.get("offset", 0)
        self._seed = state["seed"]
        self._change = state.get("change", {})

    def describe(self, first: int, last: int) -> str:
        n = len(self._sets)
        return self._sets[first % n].describe(first // n, last // n)

    def summary(self, n_samples: int) -> DataSummary:
        if self.n_samples is not None:
            n_samples = min(n_samples, self.n_samples)
        seq_len, n_tokens = self._layout.seq_len, 0
        windows = [count_windows(tokens.n_tokens, seq_len) for tokens in self._sets]
        order = self._order(seq_len, {})
        summaries = []
        sources = []
        # A change counts blocks, which are windows unless these are shorter for a time.
        change: WeightChange = self._change if seq_len == self._block else {}
        read = self._order(seq_len, change).blocks_of_sets(n_samples)
        for name, tokens, n_windows, n_read in zip(
            self._names, self._sets, windows, read, strict=True
        ):
            report = tokens.report()
            if not self._layout.document_mask:
                # only the first token of the whole text is not predicted
                report.trained_tokens = tokens.n_tokens - 1
            lengths, epochs = tokens.lengths(), n_read / n_windows
            summaries.append(
                SetSummary(
                    name=name, report=report, lengths=lengths, epochs=epochs, max_epochs=None
                )
            )
            sources += [
                (source if len(self._sets) == 1 else f"{source} of {name}", r)
                for source, r in tokens.sources
            ]
            n_tokens += tokens.n_tokens - 1
        return DataSummary(
            sets=summaries,
            sources=sources,
            max_length=seq_len + 1,
            windows_per_epoch=order.blocks_in(1),
            packing_efficiency=n_tokens / (sum(windows) * seq_len),
            follows_seed=True,
        )

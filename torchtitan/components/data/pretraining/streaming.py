"""Batches from datasets that are streamed and tokenized during training, and mixtures with them.

Each stream is split over the workers of all data-parallel ranks, called "nodes" here. Each node
packs its documents into windows and can resume at any window. The shuffle buffer of `datasets` is
not used because resuming loses its content. Instead, a node reads a block of documents and permutes
it. Its state is the stream's state before the block and the position in the block; resuming reads
the block again. In a mixture, the datasets of a node take turns, window by window, and each has its
own position (see `turns`); of local data, a node reads every n-th window of its order.

A stream is pinned to the commit that is the newest when the run begins, as rank 0 finds it, and its
state names it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.data.base import Batch, Layout
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.pretraining.order import BlockOrder, permute
from torchtitan.components.data.pretraining.token_cache import document_wrapping
from torchtitan.components.data.pretraining.tokens import Tokens
from torchtitan.components.data.pretraining.turns import WeightedTurns, WholeEpochs
from torchtitan.components.data.pretraining.windows import (
    BatchIterator,
    PackedDataset,
    Sample,
    collate,
    count_windows,
    pack,
    padding_sample,
)
from torchtitan.components.data.sources.rows import check_text
from torchtitan.components.data.sources.source import StreamSource
from torchtitan.components.data.workers import Workers
from torchtitan.components.tokenizer import ArrayEncoder, DifferentIds, Tokenizer
from torchtitan.tools.errors import RunFailure, UserError
from torchtitan.tools.logging import logger

T = TypeVar("T")

DOCUMENTS_PER_ENCODING = 64

EPOCH_BIT = 40
"""The bits of a document's number from this one on are the epoch, from 0."""


class StreamPosition(NamedTuple):
    """Position of a token in a node's stream; as a dictionary, it is JSON-serializable."""

    epoch: int = 0
    block: int = 0
    source: dict[str, Any] | None = None
    """State of the `datasets` stream before the block; None: the stream's start."""
    document: int = 0
    """Index of the document in the permuted block."""
    token: int = 0


Piece = tuple[StreamPosition, Array]
"""Position and ids (n,) of the tokens of a document, or of the rest of it; n is at least 1."""


@dataclass(frozen=True, kw_only=True)
class StreamOrder:
    """Order and repetition of a stream."""

    shuffle: bool
    block_size: int
    seed: int
    restarts: int = 0
    """Number of restarts of the stream, each shuffled differently."""
    first_epoch: int = 0


class PackedStream(IterableDataset[Batch | UserError | RunFailure]):
    """Batches of one rank; each worker packs its own shard of the data.

    Args:
        sets: streams, and in a mixture also local data.
        weights: share of each set in the windows; empty: each is read once per epoch.
        sizes: size of each set, in any unit: without weights, sets take turns by size. Empty for
            one set.
    """

    def __init__(
        self,
        sets: Sequence[StreamSource | Tokens],
        weights: Sequence[float],
        sizes: Sequence[int],
        tokenizer: Tokenizer,
        layout: Layout,
        order: StreamOrder,
    ):
        self.sets = sets
        self.weights = weights
        self.sizes = sizes
        self.encoder = ArrayEncoder(tokenizer)
        self.layout = layout
        self.order = order

    def __iter__(self) -> "PackedStreamIterator":
        worker = get_worker_info()
        workers_per_rank = max(1, self.layout.num_workers)
        node = self.layout.dp_rank * workers_per_rank + (worker.id if worker else 0)
        return PackedStreamIterator(self, node, self.layout.dp_world_size * workers_per_rank)

    @property
    def reads_whole_epochs(self) -> bool:
        """True if a set that has been read waits for the others."""
        return not self.weights and len(self.sets) > 1

    def turns(self) -> WeightedTurns | WholeEpochs:
        """Return the order in which the sets take turns."""
        epochs, first = self.layout.epochs, self.order.first_epoch
        if self.reads_whole_epochs:
            return WholeEpochs(self.sizes, epochs, first)
        return WeightedTurns(self.weights or [1], epochs)

    def feed(self, data: StreamSource | Tokens, node: int, n_nodes: int) -> "Feed":
        """Return the windows of one dataset for one node."""
        kind = StreamFeed if isinstance(data, StreamSource) else TokensFeed
        return kind(self, data, node, n_nodes)  # type: ignore[arg-type]

    def make_batch(self, samples: Sequence[Any]) -> Batch:
        """Return a batch of at most B samples, with padding."""
        layout = self.layout
        padding = padding_sample(layout.seq_len, document_mask=layout.document_mask)
        return collate([*samples, *[padding] * (layout.local_batch_size - len(samples))])


class Feed(Protocol):
    """Windows of one dataset for one node."""

    dropped: UserError | None
    """Error that none of the node's part is left, if other datasets of the mixture may continue."""

    def beginning(self, epoch: int) -> Any:
        """Return the position at the beginning of an epoch."""

    def windows(self, position: Any, epochs: int | None) -> Iterator[tuple[Any, Any]]:
        """Yield samples from a position to the end of `epochs` epochs (None: without end), with the
        position after each, as JSON-serializable values. A sample is what
        `PackedStream.make_batch` takes: a pair of values and of numbers of documents."""


class PackedStreamIterator(Iterator[Batch | UserError | RunFailure]):
    """Batches of one node; the state is the start of the next window of each dataset. Errors are
    returned as items, see `Workers`."""

    def __init__(self, dataset: PackedStream, node: int, n_nodes: int):
        self._layout = dataset.layout
        self._feeds: list[Feed] = [dataset.feed(data, node, n_nodes) for data in dataset.sets]
        self._dataset = dataset
        self.load_state_dict({"positions": [None] * len(self._feeds)})

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch as JSON-serializable values."""
        return {**self._turns.state_dict(), "positions": list(self._positions)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position; earlier versions saved the position of one stream instead."""
        first = self._dataset.order.first_epoch
        self._positions = [
            feed.beginning(first) if position is None else position
            for feed, position in zip(self._feeds, state.get("positions", [state]), strict=True)
        ]
        self._turns = self._dataset.turns()
        self._turns.load_state_dict(state)
        self._open()

    def _open(self) -> None:
        self._windows = [
            feed.windows(position, self._turns.epochs)
            for feed, position in zip(self._feeds, self._positions, strict=True)
        ]

    def __next__(self) -> Batch | UserError | RunFailure:
        try:
            return self._next_batch()
        except (UserError, RunFailure) as error:
            return error

    def _next_batch(self) -> Batch:
        layout = self._layout
        samples: list[Any] = []
        while len(samples) < layout.local_batch_size:
            if (number := self._turns.next_set()) is None:
                break
            if (window := next(self._windows[number], None)) is None:
                self._end(number)
                continue
            sample, self._positions[number] = window
            self._turns.add_window(number)
            samples.append(self._numbered(sample, number))
        if not samples:
            self._check_dropped()
            raise StopIteration
        return self._dataset.make_batch(samples)

    def _end(self, number: int) -> None:
        """Note that a dataset has no windows left. Begin the next epoch once all datasets end."""
        if (epoch := self._turns.end(number)) is not None:
            self._positions = [feed.beginning(epoch) for feed in self._feeds]
            self._open()

    def _check_dropped(self) -> None:
        """Raise the error of a dataset that was dropped entirely, if no dataset had windows."""
        errors = [feed.dropped for feed in self._feeds if feed.dropped is not None]
        if errors and self._turns.is_empty:
            raise errors[0]

    def _numbered(self, sample: Any, number: int) -> Any:
        """Return a sample whose documents' numbers are unique over all datasets."""
        values, documents = sample
        n_sets = len(self._feeds)
        return values, tuple(document * n_sets + number for document in documents)


class TokensFeed:
    """Windows of local data: every n-th one of their global order."""

    dropped: UserError | None = None

    def __init__(self, dataset: PackedStream, tokens: Tokens, node: int, n_nodes: int):
        layout, order = dataset.layout, dataset.order
        self._size = count_windows(tokens.n_tokens, layout.seq_len)
        self._node = node
        self._n_nodes = n_nodes
        self._layout = layout
        blocks = BlockOrder([self._size], shuffle=order.shuffle, seed=order.seed + order.restarts)
        self._data = PackedDataset([tokens], layout, blocks, block=layout.seq_len, n_samples=None)

    def beginning(self, epoch: int) -> int:
        return max(0, -((self._node - epoch * self._size) // self._n_nodes))

    def windows(self, position: int, epochs: int | None) -> Iterator[tuple[Sample, int]]:
        number = position
        while True:
            place = number * self._n_nodes + self._node
            if epochs is not None and place >= epochs * self._size:
                return
            number += 1
            yield self._data.sample(place * self._layout.seq_len), number


class StreamFeed:
    """Windows of a node's shard of a stream. Raises `UserError` if a shard of a mixture has no
    documents."""

    shuffles_files: ClassVar[bool] = True
    """True to read the files of a shuffled stream in another order in later epochs."""

    dropped: UserError | None = None

    def __init__(self, dataset: PackedStream, source: StreamSource, node: int, n_nodes: int):
        self.dataset = dataset
        self.source = source
        self.node = node
        self.n_nodes = n_nodes
        self._wrapping = document_wrapping(dataset.encoder.tokenizer)

    def beginning(self, epoch: int) -> dict[str, Any]:
        return StreamPosition(epoch=epoch)._asdict()

    def windows(
        self, position: dict[str, Any], epochs: int | None
    ) -> Iterator[tuple[Sample, dict[str, Any]]]:
        for sample, after in self._all_windows(StreamPosition(**position), epochs):
            yield sample, after._asdict()

    def _all_windows(
        self, position: StreamPosition, epochs: int | None
    ) -> Iterator[tuple[Sample, StreamPosition]]:
        """Yield samples with the position after each."""
        while epochs is None or position.epoch < epochs:
            at_beginning, empty = position == StreamPosition(epoch=position.epoch), True
            for window in self.epoch_windows(position):
                yield window
                empty = False
            if at_beginning and empty:
                if self.dataset.weights and len(self.dataset.sets) > 1:
                    raise UserError(
                        f"dataset {self.source.name!r} has fewer documents than the run has ranks "
                        f"and workers ({self.n_nodes}); copy it (--dataloader.stream none)"
                    )
                return  # this node has no documents: avoid an endless loop
            position = StreamPosition(epoch=position.epoch + 1)

    def epoch_windows(self, position: StreamPosition) -> Iterator[tuple[Sample, StreamPosition]]:
        seq_len = self.dataset.layout.seq_len
        skip = position.token
        n_rest = 0
        rest: list[Piece] = []
        for begin, ids in self.documents(position):
            rest.append((begin._replace(token=skip), ids[skip:]))
            n_rest, skip = n_rest + len(rest[-1][1]), 0
            while n_rest > seq_len:
                sample, rest = self._first_window(rest)
                n_rest -= seq_len
                yield sample, rest[0][0]
        if n_rest > 1:
            sample, _ = self._first_window(rest)
            yield sample, StreamPosition(epoch=position.epoch + 1)

    def _first_window(self, pieces: list[Piece]) -> tuple[Sample, list[Piece]]:
        """Return the sample of the first window of `pieces`, and the pieces from its last token
        on."""
        layout = self.dataset.layout
        ends = np.cumsum([len(ids) for _, ids in pieces])
        tokens = np.concatenate([ids[: layout.seq_len + 1] for _, ids in pieces])[
            : layout.seq_len + 1
        ]
        starts = np.append(0, ends[ends < len(tokens)])
        first, last = self.number(pieces[0][0]), self.number(pieces[len(starts) - 1][0])
        sample = pack(tokens, starts, layout.seq_len, document_mask=layout.document_mask)
        n_used = int(np.searchsorted(ends, layout.seq_len, side="right"))
        rest = pieces[n_used:]
        if rest:
            position, ids = rest[0]
            n_cut = len(ids) - (int(ends[n_used]) - layout.seq_len)
            rest[0] = position._replace(token=position.token + n_cut), ids[n_cut:]
        return (sample, (first, last)), rest

    def documents(self, position: StreamPosition) -> Iterator[tuple[StreamPosition, Any]]:
        """Yield the non-empty documents with their positions, from `position` to the end of the
        epoch."""
        for block, source, items in self._blocks(position):
            items = self._permuted(items, position.epoch, block)
            first = position.document if block == position.block else 0
            for start in range(first, len(items), DOCUMENTS_PER_ENCODING):
                numbers = range(start, min(start + DOCUMENTS_PER_ENCODING, len(items)))
                for number, document in zip(
                    numbers, self.encode(items[start : numbers.stop]), strict=True
                ):
                    if document is not None:
                        yield StreamPosition(position.epoch, block, source, number), document

    def _permuted(self, items: list[Any], epoch: int, block: int) -> list[Any]:
        order = self.dataset.order
        if not order.shuffle:
            return items
        key = (order.seed, order.restarts, epoch, block, self.node)
        return [items[permute(i, len(items), *key)] for i in range(len(items))]

    def _blocks(self, position: StreamPosition) -> Iterator[tuple[int, dict[str, Any] | None, Any]]:
        """Yield each block's number, the stream's state before it, and its items, from the block of
        `position` on."""
        source = self.source
        with _stream_failures(source):
            stream = shard_of(self.open(), self.node, self.n_nodes)
        if self.dataset.order.shuffle and self.shuffles_files:
            stream.set_epoch(position.epoch)  # shuffles the files, from the second epoch on
        if position.source is not None:
            stream.load_state_dict(position.source)
        block, state = position.block, position.source
        blocks = stream.iter(batch_size=self.dataset.order.block_size)
        while True:
            with _stream_failures(source):
                rows = next(blocks, None)
            if rows is None:
                return
            yield block, state, self.items(rows)
            block, state = block + 1, stream.state_dict()

    def open(self) -> Any:
        """Return the whole stream."""
        return self.source.open()

    def items(self, rows: Any) -> Any:
        """Return the input of `encode` for the columns of a block of rows, or for its table."""
        column, where = self.source.text_column, f"dataset {self.source.name!r}"
        return [check_text(text, column, where) for text in rows[column]]

    def encode(self, texts: list[Any]) -> Sequence[Any]:
        """Return the tokens of each document; None for a document without tokens."""
        encoder = self.dataset.encoder
        visible = [text if text.strip() else "" for text in texts]
        encoded = twice_if_different(lambda: encoder.encode_documents(visible, *self._wrapping))
        return [
            ids if text and len(ids) else None for text, ids in zip(visible, encoded, strict=True)
        ]

    def number(self, position: StreamPosition) -> int:
        """Return a number of a document that no other one has, and the same one in another epoch,
        where it has another place."""
        place = position.block * self.dataset.order.block_size + position.document
        return (position.epoch << EPOCH_BIT) + place * self.n_nodes + self.node


def twice_if_different(encode: Callable[[], T]) -> T:
    """Return the result of `encode`, called again, with a warning, if it raises `DifferentIds`."""
    try:
        return encode()
    except DifferentIds as error:
        logger.warning(
            f"{error.warning}; earlier documents of this run may have had other ids, so a position "
            "saved before may be at another token"
        )
        return encode()


@contextmanager
def _stream_failures(source: StreamSource) -> Iterator[None]:
    """Turn errors of `datasets`, the Hub client or the network into a `RunFailure`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        message = (
            f"{source.read_failure(error)}; check the network, and resume from the last checkpoint"
        )
        raise RunFailure(message) from error


def shard_of(stream: Any, node: int, n_nodes: int) -> Any:
    """Return one node's shard of a stream: whole files if there are enough, otherwise every n-th
    row."""
    from datasets.distributed import split_dataset_by_node

    if stream.num_shards >= n_nodes:
        return stream.shard(n_nodes, node, contiguous=False)
    return split_dataset_by_node(stream, node, n_nodes)


class StreamBatches(BatchIterator):
    """Batches from a stream, or a mixture with streams. Exact resumption needs the same number of
    ranks and workers; otherwise the data restarts with a warning and is shuffled differently.

    All ranks construct it together. The state names the commit of each stream on the hub, which is
    the same on all ranks, and a resumed run reads the same one.

    Args:
        sets, weights: as in `PackedStream`.
        details: further JSON-serializable values on which the windows depend.
    """

    def __init__(
        self,
        sets: Sequence[StreamSource | Tokens],
        weights: Sequence[float],
        tokenizer: Tokenizer,
        layout: Layout,
        order: StreamOrder,
        details: Sequence[Any] = (),
    ):
        # One rank asks the hub, since a push may come between the answers to two of them.
        commits = Ranks.of_run().broadcast_from_rank0(
            lambda: [self._commit(self._pinned(one, None)) for one in sets]
        )
        self._sets = [self._pinned(one, commit) for one, commit in zip(sets, commits, strict=True)]
        self._weights = weights
        self._tokenizer = tokenizer
        self._order = order
        self._workers_state: dict[str, Any] | None = None
        data = [one.key for one in sets]
        windowing = [layout.seq_len, order.shuffle, order.block_size]
        encoding = [tokenizer.fingerprint, document_wrapping(tokenizer)]
        is_alone = len(sets) == 1  # its name is older than mixtures
        named = ["stream", data[0]] if is_alone else ["streams", data, list(weights)]
        super().__init__(layout, [*named, encoding, windowing, *details])

    def stream(self) -> PackedStream:
        """Return the batches of this rank, from their beginning."""
        return PackedStream(*self._arguments)

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return (
            *(self._sets, self._weights, self._sizes),
            *(self._tokenizer, self._layout, self._order),
        )

    @cached_property
    def _sizes(self) -> list[int]:
        """Bytes of each set: without weights, sets take turns by size."""
        is_needed = len(self._sets) > 1 and not self._weights
        return [one.n_bytes() for one in self._sets] if is_needed else []

    @staticmethod
    def _pinned(data: Any, commit: str | None) -> Any:
        """Return a stream at a commit, see `StreamSource.pinned`; other data as it is."""
        return data.pinned(commit) if isinstance(data, StreamSource) else data

    def _repinned(self, data: Any, commit: str) -> Any:
        """Return a stream at the commit of a state, if it has one, and say if it is not the newest
        one."""
        newest = self._commit(data)
        if commit in ("", newest):  # "": the hub did not answer
            return data
        if newest:
            logger.warning(
                f"{data.name} has changed on the hub since the run began; it continues to read "
                f"commit {commit}, and the newest is {newest}"
            )
        return self._pinned(data, commit)

    @staticmethod
    def _commit(data: Any) -> str:
        """Return the commit of a stream; "" for other data."""
        return data.commit if isinstance(data, StreamSource) else ""

    def __next__(self) -> Batch:
        layout = self._layout
        if not self.exhausted:
            if self._workers is None:
                self._workers = Workers(
                    self.stream(), num_workers=layout.num_workers, state=self._workers_state
                )
            try:
                batch: Batch = next(self._workers)
                return batch
            except StopIteration:
                self.exhausted = True
        if layout.dp_world_size == 1:
            raise StopIteration
        return self._padding

    @cached_property
    def _padding(self) -> Batch:
        """A batch after the end of this rank's documents."""
        return self.stream().make_batch([])

    def set_weights(self, weights: Sequence[float]) -> None:
        self.close()  # keeps the position
        self._weights = list(weights)

    def _shard_counts(self) -> dict[str, int]:
        layout = self._layout
        return {
            "ranks": layout.dp_world_size,
            "rank": layout.dp_rank,
            "workers": layout.num_workers,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "layout": self._shard_counts(),
            "seed": self._order.seed,
            "restarts": self._order.restarts,
            "first_epoch": self._order.first_epoch,
            "ended_after_epochs": self._layout.epochs if self.exhausted else None,
            "workers": self._workers.state_dict() if self._workers else self._workers_state,
            "weights": list(self._weights),
            "sizes": self._sizes,
            "commits": [self._commit(one) for one in self._sets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        self.exhausted = False
        self._workers_state = None
        self._weights = state.get("weights", self._weights)
        if "sizes" in state:  # which are not asked for again
            self._sizes = state["sizes"]
        if commits := state.get("commits"):
            self._sets = [
                self._repinned(one, commit) for one, commit in zip(self._sets, commits, strict=True)
            ]
        order = replace(
            self._order,
            seed=state["seed"],
            restarts=state["restarts"],
            first_epoch=state["first_epoch"],
        )
        ended, epochs = state["ended_after_epochs"], self._layout.epochs
        if state["layout"] == self._shard_counts():
            self._order = order if ended is None else replace(order, first_epoch=ended)
            self.exhausted = ended is not None and epochs is not None and ended >= epochs
            self._workers_state = state["workers"] if ended is None else None
            if len(self._sets) > 1 and self._weights and ended is not None and not self.exhausted:
                raise UserError(
                    f"the mixture was read to its end, after {ended} epochs of one of its "
                    "datasets, and cannot be continued; set the epochs before a run"
                )
        else:
            self._order = replace(order, restarts=order.restarts + 1)
            logger.warning(
                f"the position in {self._names} was saved with "
                f"{_in_words(state['layout'])}, but this run has "
                f"{_in_words(self._shard_counts())}: the stream restarts from its beginning and is "
                "shuffled differently. To resume exactly, use the same number of ranks and workers"
            )

    @property
    def _names(self) -> str:
        return ", ".join(repr(one.name) for one in self._sets if isinstance(one, StreamSource))

    def describe(self, first: int, last: int) -> str:
        source = self._sets[first % len(self._sets)]
        first, last = first // len(self._sets), last // len(self._sets)
        if not isinstance(source, StreamSource):
            return source.describe(first, last)
        epoch, first = divmod(first, 1 << EPOCH_BIT)
        begin, reader = self._reader(first)
        end, _ = self._reader(last % (1 << EPOCH_BIT))
        documents = f"document {begin + 1}" if begin == end else f"documents {begin + 1}-{end + 1}"
        in_epoch = f" of epoch {epoch + 1}" if epoch else ""
        return f"{source.name} ({source.split}), {documents}{in_epoch} {reader}"

    def _reader(self, number: int) -> tuple[int, str]:
        """Return the place of a document or row in its reader's part, from 0, and the reader in
        words."""
        workers_per_rank = max(1, self._layout.num_workers)
        place, node = divmod(number, self._layout.dp_world_size * workers_per_rank)
        rank, worker = divmod(node, workers_per_rank)
        again = f" after restart {n}" if (n := self._order.restarts) else ""
        return place, f"as read by worker {worker} of rank {rank}{again}"

    def close(self) -> None:
        if self._workers is not None:
            self._workers_state = self._workers.state_dict()
        super().close()


def _in_words(layout: dict[str, int]) -> str:
    counts = {"rank": layout["ranks"], "worker": layout["workers"]}
    ranks, workers = (f"{count} {word}" + "s" * (count != 1) for word, count in counts.items())
    return f"{ranks} and {workers} per rank"

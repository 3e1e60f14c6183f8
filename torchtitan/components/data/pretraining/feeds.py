"""Windows of a node's part of one dataset, epoch by epoch.

A node reads a stream in blocks of documents or rows, and permutes each block; the shuffle buffer of
`datasets` is not used because resuming loses its content. A position is the stream's state before
the block and the place in it; resuming reads the block again. Of local data, a node reads every
n-th window of its order.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from torchtitan.components.data.base import Layout
from torchtitan.components.data.plan.sampler import Array, State
from torchtitan.components.data.pretraining.order import BlockOrder, permute
from torchtitan.components.data.pretraining.streamed_windows import (
    Content,
    StreamedWindows,
    StreamOrder,
    Window,
)
from torchtitan.components.data.pretraining.token_cache import document_wrapping
from torchtitan.components.data.pretraining.tokens import Tokens
from torchtitan.components.data.pretraining.windows import (
    Arrays,
    PackedDataset,
    count_windows,
    pack,
)
from torchtitan.components.data.sources.rows import check_text
from torchtitan.components.data.sources.source import StreamSource
from torchtitan.components.tokenizer import DifferentIds
from torchtitan.tools.errors import RunFailure, UserError
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    import datasets

T = TypeVar("T")
Item = TypeVar("Item")
"""A document as it is read: a text, or a row."""
Encoded = TypeVar("Encoded")
"""A document as tokens."""

DOCUMENTS_PER_ENCODING = 64

EPOCH_BIT = 40
"""The bits of a document's number from this one on are the epoch, from 0."""


class StreamPosition(NamedTuple):
    """Position of a token in a node's stream; as a dictionary, it is JSON-serializable."""

    epoch: int = 0
    block: int = 0
    source: State | None = None
    """State of the `datasets` stream before the block; None: the stream's start."""
    document: int = 0
    """Index of the document in the permuted block."""
    token: int = 0


class TokensFeed:
    """Windows of local data: every n-th one of their global order."""

    dropped: UserError | None = None

    def __init__(self, layout: Layout, order: StreamOrder, tokens: Tokens, node: int, n_nodes: int):
        self._size = count_windows(tokens.n_tokens, layout.seq_len)
        self._node = node
        self._n_nodes = n_nodes
        self._layout = layout
        blocks = BlockOrder([self._size], shuffle=order.shuffle, seed=order.seed + order.restarts)
        self._data = PackedDataset([tokens], layout, blocks, block=layout.seq_len, n_samples=None)

    def beginning(self, epoch: int) -> int:
        return max(0, -((self._node - epoch * self._size) // self._n_nodes))

    def windows(self, position: int, epochs: int | None) -> Iterator[tuple[Window[Arrays], int]]:
        number = position
        while True:
            place = number * self._n_nodes + self._node
            if epochs is not None and place >= epochs * self._size:
                return
            number += 1
            yield self._data.sample(place * self._layout.seq_len), number


class EpochFeed(Generic[Content]):
    """Windows of a node's part of a dataset, epoch by epoch: a subclass reads an epoch. Raises
    `UserError` if a node's part of a mixture with weights has no documents.

    Args:
        dataset: the stream, with its layout and order.
        node: number of this node, from 0.
        n_nodes: number of nodes.
    """

    dropped: UserError | None = None

    def __init__(self, dataset: StreamedWindows[Any, Content], node: int, n_nodes: int):
        self.dataset = dataset
        self.node = node
        self.n_nodes = n_nodes

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the data in messages."""

    def beginning(self, epoch: int) -> State:
        return StreamPosition(epoch=epoch)._asdict()

    def windows(
        self, position: State, epochs: int | None
    ) -> Iterator[tuple[Window[Content], State]]:
        for window, after in self._all_windows(StreamPosition(**position), epochs):
            yield window, after._asdict()

    def _all_windows(
        self, position: StreamPosition, epochs: int | None
    ) -> Iterator[tuple[Window[Content], StreamPosition]]:
        """Yield windows with the position after each."""
        while epochs is None or position.epoch < epochs:
            at_beginning, empty = position == StreamPosition(epoch=position.epoch), True
            for window in self.epoch_windows(position):
                yield window
                empty = False
            if at_beginning and empty:
                if self.dataset.weights and len(self.dataset.sets) > 1:
                    raise UserError(
                        f"dataset {self.name!r} has fewer documents than the run has ranks "
                        f"and workers ({self.n_nodes}); copy it (--dataloader.stream none)"
                    )
                return  # this node has no documents: avoid an endless loop
            position = StreamPosition(epoch=position.epoch + 1)

    @abstractmethod
    def epoch_windows(
        self, position: StreamPosition
    ) -> Iterator[tuple[Window[Content], StreamPosition]]:
        """Yield the windows from a position to the end of its epoch, with the position after
        each."""

    def number(self, position: StreamPosition) -> int:
        """Return a number of a document that no other one has, and the same one in another epoch,
        where it has another place."""
        place = position.block * self.dataset.order.block_size + position.document
        return (position.epoch << EPOCH_BIT) + place * self.n_nodes + self.node


class Block(NamedTuple):
    """Consecutive rows of a node's part of a stream."""

    number: int
    """Number in the epoch, from 0."""
    before: State | None
    """State of the `datasets` stream before the block; None: the stream's start."""
    rows: Any
    """Values by column, or an Arrow table: as `datasets` formats the stream's batches."""


@dataclass(frozen=True, kw_only=True)
class StreamBlocks:
    """Blocks of a node's part of a stream."""

    source: StreamSource
    open: "Callable[[], datasets.IterableDataset]"
    node: int
    n_nodes: int
    size: int
    """Rows of a block."""
    shuffles_files: bool
    """True to read the files in another order in later epochs."""

    def from_position(self, position: StreamPosition) -> Iterator[Block]:
        """Yield the blocks of an epoch from the one of a position on. Raise `RunFailure` for errors
        of `datasets`, the Hub client or the network."""
        with _stream_failures(self.source):
            stream = shard_of(self.open(), self.node, self.n_nodes)
        if self.shuffles_files:
            stream.set_epoch(position.epoch)  # shuffles the files, from the second epoch on
        if position.source is not None:
            stream.load_state_dict(position.source)
        number, state = position.block, position.source
        batches = stream.iter(batch_size=self.size)
        while True:
            with _stream_failures(self.source):
                rows = next(batches, None)
            if rows is None:
                return
            yield Block(number, state, rows)
            number, state = number + 1, stream.state_dict()


class DocumentsFeed(EpochFeed[Content], Generic[Content, Item, Encoded]):
    """Windows of the documents of a stream, which are encoded a few at a time."""

    def __init__(
        self,
        dataset: StreamedWindows[Any, Content],
        source: StreamSource,
        node: int,
        n_nodes: int,
    ):
        super().__init__(dataset, node, n_nodes)
        self.source = source

    @property
    def name(self) -> str:
        return self.source.name

    def open(self) -> "datasets.IterableDataset":
        """Return the whole stream."""
        return self.source.open()

    @abstractmethod
    def items(self, rows: dict[str, list[Any]]) -> list[Item]:
        """Return the documents in the columns of a block of rows."""

    @abstractmethod
    def encode(self, items: list[Item]) -> Sequence[Encoded | None]:
        """Return each document as tokens; None for one without tokens."""

    def documents(self, position: StreamPosition) -> Iterator[tuple[StreamPosition, Encoded]]:
        """Yield the non-empty documents with their positions, from `position` to the end of the
        epoch."""
        order = self.dataset.order
        blocks = StreamBlocks(
            source=self.source,
            open=self.open,
            node=self.node,
            n_nodes=self.n_nodes,
            size=order.block_size,
            shuffles_files=order.shuffle,
        )
        for block, before, rows in blocks.from_position(position):
            items = self._permuted(self.items(rows), position.epoch, block)
            first = position.document if block == position.block else 0
            for start in range(first, len(items), DOCUMENTS_PER_ENCODING):
                encoded = self.encode(items[start : start + DOCUMENTS_PER_ENCODING])
                for number, document in enumerate(encoded, start):
                    if document is not None:
                        yield StreamPosition(position.epoch, block, before, number), document

    def _permuted(self, items: list[Item], epoch: int, block: int) -> list[Item]:
        order = self.dataset.order
        if not order.shuffle:
            return items
        key = (order.seed, order.restarts, epoch, block, self.node)
        return [items[permute(i, len(items), *key)] for i in range(len(items))]


Piece = tuple[StreamPosition, Array]
"""Position and ids (n,) of the tokens of a document, or of the rest of it; n is at least 1."""


class StreamFeed(DocumentsFeed[Arrays, str, Array]):
    """Windows of the texts of a stream, as one running text."""

    @cached_property
    def _wrapping(self) -> tuple[list[int], list[int]]:
        return document_wrapping(self.dataset.encoder.tokenizer)

    def items(self, rows: dict[str, list[Any]]) -> list[str]:
        column, where = self.source.text_column, f"dataset {self.name!r}"
        return [check_text(text, column, where) for text in rows[column]]

    def encode(self, texts: list[str]) -> Sequence[Array | None]:
        encoder = self.dataset.encoder
        visible = [text if text.strip() else "" for text in texts]
        encoded = twice_if_different(lambda: encoder.encode_documents(visible, *self._wrapping))
        return [
            ids if text and len(ids) else None for text, ids in zip(visible, encoded, strict=True)
        ]

    def epoch_windows(
        self, position: StreamPosition
    ) -> Iterator[tuple[Window[Arrays], StreamPosition]]:
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

    def _first_window(self, pieces: list[Piece]) -> tuple[Window[Arrays], list[Piece]]:
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


def shard_of(
    stream: "datasets.IterableDataset", node: int, n_nodes: int
) -> "datasets.IterableDataset":
    """Return one node's shard of a stream: whole files if there are enough, otherwise every n-th
    row."""
    from datasets.distributed import split_dataset_by_node

    if stream.num_shards >= n_nodes:
        return stream.shard(n_nodes, node, contiguous=False)
    return split_dataset_by_node(stream, node, n_nodes)

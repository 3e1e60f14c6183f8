"""Batches that each worker of a rank, a "node", packs from its own part of streams.

In a mixture, the datasets of a node take turns, window by window (see `turns`), and each has its
own position (see `feeds`).
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from torchtitan.components.data.base import Batch, Layout
from torchtitan.components.data.plan.sampler import State
from torchtitan.components.data.pretraining.turns import WeightedTurns, WholeEpochs
from torchtitan.components.data.workers import Item
from torchtitan.components.tokenizer import ArrayEncoder, Tokenizer
from torchtitan.tools.errors import RunFailure, UserError

Set = TypeVar("Set")
"""A dataset of a mixture."""
Content = TypeVar("Content")
"""Content of a window: its arrays, or the samples in it."""
ReadContent = TypeVar("ReadContent", covariant=True)

Window = tuple[Content, tuple[int, ...]]
"""Content of a window, and the numbers of its documents."""


@dataclass(frozen=True, kw_only=True)
class StreamOrder:
    """Order and repetition of a stream."""

    shuffle: bool
    block_size: int
    seed: int
    restarts: int = 0
    """Number of restarts of the stream, each shuffled differently."""
    first_epoch: int = 0


class Feed(Protocol[ReadContent]):
    """Windows of one dataset for one node."""

    dropped: UserError | None
    """Error that none of the node's part is left, if other datasets of the mixture may continue."""

    def beginning(self, epoch: int) -> Any:
        """Return the position at the beginning of an epoch, as JSON-serializable values."""

    def windows(
        self, position: Any, epochs: int | None
    ) -> Iterator[tuple[Window[ReadContent], Any]]:
        """Yield windows from a position to the end of `epochs` epochs (None: without end), with the
        position after each."""


class StreamedWindows(IterableDataset[Item], Generic[Set, Content]):
    """Batches of one rank; each worker packs its own shard of the data.

    Args:
        sets: streams, and in a mixture also local data.
        weights: share of each set in the windows; empty: each is read once per epoch.
        sizes: size of each set, in any unit: without weights, sets take turns by size. Empty for
            one set.
    """

    def __init__(
        self,
        sets: Sequence[Set],
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

    def __iter__(self) -> "WindowsOfNode[Content]":
        worker = get_worker_info()
        workers_per_rank = max(1, self.layout.num_workers)
        node = self.layout.dp_rank * workers_per_rank + (worker.id if worker else 0)
        n_nodes = self.layout.dp_world_size * workers_per_rank
        return WindowsOfNode(self, [self.feed(data, node, n_nodes) for data in self.sets])

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

    @abstractmethod
    def feed(self, data: Set, node: int, n_nodes: int) -> Feed[Content]:
        """Return the windows of one dataset for one node."""

    @abstractmethod
    def make_batch(self, windows: Sequence[Window[Content]]) -> Batch:
        """Return a batch of at most B windows, with padding."""


class WindowsOfNode(Iterator[Item], Generic[Content]):
    """Batches of one node; the state is the start of the next window of each dataset. Errors are
    returned as items, see `Workers`."""

    def __init__(self, dataset: StreamedWindows[Any, Content], feeds: Sequence[Feed[Content]]):
        self._dataset = dataset
        self._feeds = feeds
        self.load_state_dict({"positions": [None] * len(feeds)})

    def state_dict(self) -> State:
        """Return the position after the last batch as JSON-serializable values."""
        return {**self._turns.state_dict(), "positions": list(self._positions)}

    def load_state_dict(self, state: State) -> None:
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

    def __next__(self) -> Item:
        try:
            return self._next_batch()
        except (UserError, RunFailure) as error:
            return error

    def _next_batch(self) -> Batch:
        windows: list[Window[Content]] = []
        while len(windows) < self._dataset.layout.local_batch_size:
            if (number := self._turns.next_set()) is None:
                break
            if (found := next(self._windows[number], None)) is None:
                self._end(number)
                continue
            (content, documents), self._positions[number] = found
            self._turns.add_window(number)
            # unique over all datasets
            numbers = tuple(document * len(self._feeds) + number for document in documents)
            windows.append((content, numbers))
        if not windows:
            self._check_dropped()
            raise StopIteration
        return self._dataset.make_batch(windows)

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

"""Batches from datasets that are streamed and tokenized during training, and mixtures with them.

Each stream is split over the workers of all data-parallel ranks (see `streamed_windows`). A stream
is pinned to the commit that is the newest when the run begins, as rank 0 finds it, and its
state names it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic, NotRequired, Protocol, Self, TypedDict, TypeVar

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.data.base import Batch, Layout
from torchtitan.components.data.plan.sampler import State
from torchtitan.components.data.pretraining.feeds import EPOCH_BIT, StreamFeed, TokensFeed
from torchtitan.components.data.pretraining.streamed_windows import (
    Feed,
    StreamedWindows,
    StreamOrder,
    Window,
)
from torchtitan.components.data.pretraining.token_cache import document_wrapping
from torchtitan.components.data.pretraining.tokens import Tokens
from torchtitan.components.data.pretraining.windows import (
    Arrays,
    BatchIterator,
    collate,
    padding_sample,
)
from torchtitan.components.data.sources.source import StreamSource
from torchtitan.components.data.workers import Workers
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger


class PackedStream(StreamedWindows[StreamSource | Tokens, Arrays]):
    """Batches of running text."""

    def feed(self, data: StreamSource | Tokens, node: int, n_nodes: int) -> Feed[Arrays]:
        if isinstance(data, Tokens):
            return TokensFeed(self.layout, self.order, data, node, n_nodes)
        return StreamFeed(self, data, node, n_nodes)

    def make_batch(self, windows: Sequence[Window[Arrays]]) -> Batch:
        layout = self.layout
        padding = padding_sample(layout.seq_len, document_mask=layout.document_mask)
        return collate([*windows, *[padding] * (layout.local_batch_size - len(windows))])


class StreamedSet(Protocol):
    """A dataset of a mixture with streams."""

    @property
    def key(self) -> object:
        """JSON-serializable value that is equal for the same data."""

    @property
    def commit(self) -> str:
        """Commit that is read; empty: unknown, or local data."""

    def n_bytes(self) -> int:
        """Return the bytes of the data as it is stored."""

    def pinned(self, commit: str | None = None) -> Self:
        """Return the data at a commit; None: the newest one."""

    def resumed(self, commit: str) -> Self:
        """Return the data at the commit of a saved position."""


S = TypeVar("S", bound=StreamedSet)


class ShardCounts(TypedDict):
    """The division of a stream over ranks and their workers, as one rank sees it."""

    ranks: int
    rank: int
    workers: int


class StreamState(TypedDict):
    """A position in streams. Values that are not required are missing in older ones."""

    layout: ShardCounts
    seed: int
    restarts: int
    """See `StreamOrder`, as `first_epoch`."""
    first_epoch: int
    ended_after_epochs: int | None
    """Epochs of a run that has read all data; None: some is left."""
    workers: State | None
    """State of the worker processes; None: the beginning."""
    weights: NotRequired[list[float]]
    sizes: NotRequired[list[int]]
    commits: NotRequired[list[str]]


class StreamBatches(BatchIterator[StreamState], Generic[S]):
    """Batches from a stream, or a mixture with streams. Exact resumption needs the same number of
    ranks and workers; otherwise the data restarts with a warning and is shuffled differently.

    All ranks construct it together. The state names the commit of each stream on the hub, which is
    the same on all ranks, and a resumed run reads the same one.

    Args:
        sets, weights: as in `StreamedWindows`.
        details: further JSON-serializable values on which the windows depend.
    """

    def __init__(
        self,
        sets: Sequence[S],
        weights: Sequence[float],
        tokenizer: Tokenizer,
        layout: Layout,
        order: StreamOrder,
        details: Sequence[object] = (),
    ):
        # One rank asks the hub, since a push may come between the answers to two of them.
        commits = Ranks.of_run().broadcast_from_rank0(lambda: [one.pinned().commit for one in sets])
        self._sets = [one.pinned(commit) for one, commit in zip(sets, commits, strict=True)]
        self._weights = weights
        self._tokenizer = tokenizer
        self._order = order
        self._workers_state: State | None = None
        data = [one.key for one in sets]
        windowing = [layout.seq_len, order.shuffle, order.block_size]
        encoding = [tokenizer.fingerprint, document_wrapping(tokenizer)]
        is_alone = len(sets) == 1  # its name is older than mixtures
        named = ["stream", data[0]] if is_alone else ["streams", data, list(weights)]
        super().__init__(layout, [*named, encoding, windowing, *details])

    def stream(self) -> StreamedWindows[Any, Any]:
        """Return the batches of this rank, from their beginning."""
        return PackedStream(*self._arguments)

    @property
    def _arguments(
        self,
    ) -> tuple[Sequence[Any], Sequence[float], Sequence[int], Tokenizer, Layout, StreamOrder]:
        """Arguments of `StreamedWindows`."""
        sets, layout = self._sets, self._layout
        return sets, self._weights, self._sizes, self._tokenizer, layout, self._order

    @cached_property
    def _sizes(self) -> list[int]:
        """Bytes of each set: without weights, sets take turns by size."""
        is_needed = len(self._sets) > 1 and not self._weights
        return [one.n_bytes() for one in self._sets] if is_needed else []

    def __next__(self) -> Batch:
        layout = self._layout
        if not self.exhausted:
            if self._workers is None:
                self._workers = Workers(
                    self.stream(), num_workers=layout.num_workers, state=self._workers_state
                )
            try:
                return next(self._workers)
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

    def _shard_counts(self) -> ShardCounts:
        layout = self._layout
        return ShardCounts(
            ranks=layout.dp_world_size, rank=layout.dp_rank, workers=layout.num_workers
        )

    def state_dict(self) -> StreamState:
        return {
            "layout": self._shard_counts(),
            "seed": self._order.seed,
            "restarts": self._order.restarts,
            "first_epoch": self._order.first_epoch,
            "ended_after_epochs": self._layout.epochs if self.exhausted else None,
            "workers": self._workers.state_dict() if self._workers else self._workers_state,
            "weights": list(self._weights),
            "sizes": self._sizes,
            "commits": [one.commit for one in self._sets],
        }

    def load_state_dict(self, state: StreamState) -> None:
        self.close()
        self.exhausted = False
        self._workers_state = None
        self._weights = state.get("weights", self._weights)
        if "sizes" in state:  # which are not asked for again
            self._sizes = state["sizes"]
        if commits := state.get("commits"):
            self._sets = [
                one.resumed(commit) for one, commit in zip(self._sets, commits, strict=True)
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
        if isinstance(source, Tokens):
            return source.describe(first, last)
        assert isinstance(source, StreamSource)
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


def _in_words(layout: ShardCounts) -> str:
    counts = {"rank": layout["ranks"], "worker": layout["workers"]}
    ranks, workers = (f"{count} {word}" + "s" * (count != 1) for word, count in counts.items())
    return f"{ranks} and {workers} per rank"

"""Packs one source's samples into windows, chunk by chunk, without splitting samples.

The bin-packing functions take the samples' lengths (n,), each from 1 to `capacity`, and return the
sample indices of each window in ascending order. They are deterministic.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np

from torchtitan.components.data.plan.sampler import (
    Array,
    Sampler,
    State,
    arrays_to_lists,
    permutation,
)


def no_packing(lengths: Array, capacity: int) -> list[Array]:
    """Return one window per sample."""
    _check(lengths, capacity)
    return [np.array([index]) for index in range(len(lengths))]


def first_fit_decreasing(lengths: Array, capacity: int) -> list[Array]:
    """Put each sample, longest first, into the first window with enough room: O(n log n).

    Uses at most 11/9 of the optimal number of windows plus 6/9 (Dósa, "The tight bound of first fit
    decreasing bin-packing algorithm", 2007). With samples much shorter than the window, only the
    last few windows are not full.
    """
    _check(lengths, capacity)
    return _windows(_first_fit_decreasing(lengths, capacity))


def multipack(lengths: Array, capacity: int) -> list[Array]:
    """Fill windows equally, to balance tokens between ranks and micro-batches.

    Puts each sample, longest first, into the least full window ("longest processing time first";
    Graham, "Bounds on multiprocessing timing anomalies", 1969). Uses the number of windows of
    first-fit-decreasing, increased by 0.5 % until no window is too full: O(n log n).
    """
    n_windows = len(first_fit_decreasing(lengths, capacity))
    while n_windows:
        window_of = _longest_processing_time(lengths, n_windows)
        if np.bincount(window_of, weights=lengths).max() <= capacity:
            return _windows(window_of)
        n_windows += -(-n_windows // 200)
    return []


def _longest_processing_time(lengths: Array, n_windows: int) -> Array:
    order = np.argsort(-lengths, kind="stable")
    # An entry of the heap is `load * n_windows + window`: the least full window first, ties by
    # number.
    heap = list(range(n_windows))
    window_of = np.empty(len(lengths), np.int64)
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        window_of[index] = heap[0] % n_windows
        heapq.heapreplace(heap, heap[0] + length * n_windows)
    return window_of


def _first_fit_decreasing(lengths: Array, capacity: int) -> Array:
    # A binary tree over the windows, as an array: leaf `n_leaves + w` is the room left in window w,
    # and each inner node the most room below it, so that the first window with room is found from
    # the root.
    n_leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * n_leaves)
    window_of = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        node = 1
        while node < n_leaves:
            node *= 2
            if room[node] < length:
                node += 1
        window_of[index] = node - n_leaves
        room[node] -= length
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return window_of


def _windows(window_of: Array) -> list[Array]:
    order = np.argsort(window_of, kind="stable")
    starts = np.flatnonzero(np.diff(window_of[order], prepend=-1))
    return np.split(order, starts[1:]) if len(order) else []


def _check(lengths: Array, capacity: int) -> None:
    assert len(lengths) == 0 or 1 <= lengths.min() <= lengths.max() <= capacity, (
        "a sample must fit into a window"
    )


Packing = Literal["ffd", "multipack", "none"]
"""First-fit-decreasing, equally filled windows, or one sample per window."""

PACKINGS: dict[Packing, Callable[[Array, int], list[Array]]] = {
    "ffd": first_fit_decreasing,
    "multipack": multipack,
    "none": no_packing,
}


@dataclass(frozen=True, slots=True)
class Window:
    """Samples that share a window."""

    source: int
    epoch: int
    """Epoch of the source, from 0."""
    samples: Array
    """Numbers of the samples in the source, in drawing order."""
    n_tokens: int
    """Positions taken by the samples."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Samples drawn and packed together; chunks are numbered from 1."""

    number: int
    epoch: int
    drawn: Array
    windows: list[Array]
    n_tokens: list[int]


_NO_CHUNK = _Chunk(number=0, epoch=0, drawn=np.empty(0, np.int64), windows=[], n_tokens=[])

StreamSnapshot = tuple[_Chunk, int, State]
"""A position: the chunk, the number of returned windows of the chunk, and the sampler's state."""


class SourceState(TypedDict):
    """Position of a `SourceStream`."""

    chunk: int
    """Number of the chunk, from 1; 0 before the first."""
    epoch: int
    """Epoch of the chunk, from 0."""
    drawn: list[int]
    """Samples of the chunk; empty if all of its windows were returned."""
    given: int
    """Windows of the chunk that were returned."""
    seed: int
    sampler: State


class SourceStream:
    """Windows of one source, in order; see `Planner` for the arguments."""

    def __init__(
        self,
        source: int,
        lengths: Array,
        capacity: int,
        sampler: Sampler,
        *,
        packing: Packing,
        chunk: int,
        seed: int,
        epochs: int | None,
    ):
        self.sampler = sampler
        self._source = source
        self._lengths = lengths
        self._capacity = capacity
        self._packing = packing
        self._chunk_size = chunk
        self._seed = seed
        self._epochs = epochs
        self._chunk = _NO_CHUNK
        self._n_returned = 0

    def next_size(self) -> int | None:
        """Return the tokens of the next window; None after the last epoch."""
        if self._n_returned == len(self._chunk.windows):
            if self._epochs is not None and self.sampler.epoch >= self._epochs:
                return None
            epoch = self.sampler.epoch
            self._chunk = self._pack(
                self._chunk.number + 1, epoch, self.sampler.draw(self._chunk_size)
            )
            self._n_returned = 0
        return self._chunk.n_tokens[self._n_returned]

    def next_window(self) -> Window:
        n_tokens = self.next_size()
        assert n_tokens is not None
        samples = self._chunk.drawn[self._chunk.windows[self._n_returned]]
        self._n_returned += 1
        return Window(self._source, self._chunk.epoch, samples, n_tokens)

    def snapshot(self) -> StreamSnapshot:
        return self._chunk, self._n_returned, self.sampler.state_dict()

    def state_dict(self, snapshot: StreamSnapshot) -> SourceState:
        """Return a position of this stream."""
        chunk, n_returned, sampler = snapshot
        return {
            "chunk": chunk.number,
            "epoch": chunk.epoch,
            "drawn": chunk.drawn.tolist() if n_returned < len(chunk.windows) else [],
            "given": n_returned if n_returned < len(chunk.windows) else 0,
            "seed": self._seed,
            "sampler": arrays_to_lists(sampler),
        }

    def load_state_dict(self, state: SourceState) -> None:
        self._seed = state["seed"]
        self.sampler.load_state_dict(state["sampler"])
        self._chunk = self._pack(state["chunk"], state["epoch"], np.array(state["drawn"], np.int64))
        self._n_returned = state["given"]

    def _pack(self, number: int, epoch: int, drawn: Array) -> _Chunk:
        lengths = self._lengths[drawn]
        windows = PACKINGS[self._packing](lengths, self._capacity)
        if self.sampler.in_order:
            windows.sort(key=lambda window: int(window[0]))
        else:
            # Packing orders windows by sample length.
            windows = [
                windows[i] for i in permutation(len(windows), self._seed, self._source, number)
            ]
        return _Chunk(
            number, epoch, drawn, windows, [int(lengths[window].sum()) for window in windows]
        )

"""Windows of one source: its sampler's draws, packed chunk by chunk, with no sample split.

The bin-packing functions take the samples' lengths (n,), each from 1 to `capacity`, and return the windows as ascending
sample indices. They are deterministic.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from torchtitan.components.data.plan.sampler import Array, Sampler, permutation, without_arrays

_SWAPPED_AMONG = 8192
"""Samples among which `multipack` searches for a swap."""


def no_packing(lengths: Array, capacity: int) -> list[Array]:
    """Return one window per sample: no packing."""
    _check(lengths, capacity)
    return [np.array([index]) for index in range(len(lengths))]


def first_fit_decreasing(lengths: Array, capacity: int) -> list[Array]:
    """Put the longest samples first, each into the first window with room: O(n log n).

    Uses at most 11/9 of the optimal number of windows plus 6/9 (Dósa, "The tight bound of first fit decreasing
    bin-packing algorithm", 2007). If samples are much shorter than the window, it fills all but the last few windows.
    """
    _check(lengths, capacity)
    return _windows(_first_fit_decreasing(lengths, capacity))


def multipack(lengths: Array, capacity: int) -> list[Array]:
    """Fill windows equally, so that ranks and micro-batches are balanced in tokens.

    Uses as many windows as first-fit-decreasing, or a few percent more if that number cannot be filled equally. The
    longest samples go first, each into the least full window ("longest processing time first"; Graham, "Bounds on
    multiprocessing timing anomalies", 1969); overfull windows then swap a sample for a shorter one. A swap searches all
    samples, so they are packed in parts of 8,192: O(n log n).
    """
    _check(lengths, capacity)
    starts = range(0, len(lengths), _SWAPPED_AMONG)
    return [
        start + window
        for start in starts
        for window in _windows(_equal_windows(lengths[start : start + _SWAPPED_AMONG], capacity))
    ]


def _equal_windows(lengths: Array, capacity: int) -> Array:
    n_windows = int(_first_fit_decreasing(lengths, capacity).max()) + 1
    while (window_of := _fit_equally(lengths, capacity, n_windows)) is None:
        n_windows += -(-n_windows // 100)
    return window_of


def _fit_equally(lengths: Array, capacity: int, n_windows: int) -> Array | None:
    """Return the window of each sample; None if no swap relieves an overfull window."""
    window_of = _longest_processing_time(lengths, n_windows)
    room = capacity - np.bincount(window_of, weights=lengths, minlength=n_windows).astype(np.int64)
    for window in np.flatnonzero(room < 0).tolist():
        while room[window] < 0:
            swap = _best_swap(lengths, window_of, room, window)
            if swap is None:
                return None
            given, taken = swap
            difference = lengths[given] - lengths[taken]
            room[window] += difference
            room[window_of[taken]] -= difference
            window_of[given], window_of[taken] = window_of[taken], window
    return window_of


def _best_swap(lengths: Array, window_of: Array, room: Array, window: int) -> tuple[int, int] | None:
    """Return a sample of an overfull window and the sample to swap it for that leaves the window fullest, or, if no
    swap suffices, relieves it most; None if none helps."""
    best, best_rank = None, (True, 0)
    for given in np.flatnonzero(window_of == window).tolist():
        gains = lengths[given] - lengths  # tokens that move from the window to the other
        gains[gains > room[window_of]] = 0
        enough = gains >= -room[window]
        taken = int(np.argmin(np.where(enough, gains, np.iinfo(np.int64).max)) if enough.any() else np.argmax(gains))
        rank = (not enough.any(), int(gains[taken] if enough.any() else -gains[taken]))
        if gains[taken] > 0 and (best is None or rank < best_rank):
            best, best_rank = (given, taken), rank
    return best


def _longest_processing_time(lengths: Array, n_windows: int) -> Array:
    order = np.argsort(-lengths, kind="stable")
    # An entry of the heap is `load * n_windows + window`: the least full window first, ties by number.
    heap = list(range(n_windows))
    window_of = np.empty(len(lengths), np.int64)
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        window_of[index] = heap[0] % n_windows
        heapq.heapreplace(heap, heap[0] + length * n_windows)
    return window_of


def _first_fit_decreasing(lengths: Array, capacity: int) -> Array:
    # A binary tree over the windows, as an array: leaf `n_leaves + w` is the room left in window w, and each inner
    # node the most room below it, so that the first window with room is found from the root.
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
    assert len(lengths) == 0 or 1 <= lengths.min() <= lengths.max() <= capacity, "a sample must fit into a window"


Packing = Literal["ffd", "multipack", "none"]
"""First-fit-decreasing, equally filled windows, or one sample per window."""

PACKINGS: dict[Packing, Callable[[Array, int], list[Array]]] = {
    "ffd": first_fit_decreasing,
    "multipack": multipack,
    "none": no_packing,
}


@dataclass(frozen=True, slots=True)
class Window:
    """Samples that share one window."""

    source: int
    epoch: int
    """Pass over the source, from 0, that the samples belong to."""
    samples: Array
    """Their numbers in the source, in drawing order."""
    n_tokens: int
    """Positions of the window that they take."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Samples drawn and packed together; chunks are numbered from 1."""

    number: int
    epoch: int
    drawn: Array
    windows: list[Array]
    n_tokens: list[int]


_NO_CHUNK = _Chunk(number=0, epoch=0, drawn=np.empty(0, np.int64), windows=[], n_tokens=[])

StreamSnapshot = tuple[_Chunk, int, dict[str, Any]]
"""A position: the chunk, the number of its windows already returned, and the sampler's state."""


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
        self._source, self._lengths, self._capacity = source, lengths, capacity
        self._packing, self._chunk_size, self._seed, self._epochs = packing, chunk, seed, epochs
        self._chunk = _NO_CHUNK
        self._given = 0

    def next_size(self) -> int | None:
        """Return the tokens of the next window; None after the last epoch."""
        if self._given == len(self._chunk.windows):
            if self._epochs is not None and self.sampler.epoch >= self._epochs:
                return None
            epoch = self.sampler.epoch
            self._chunk = self._pack(self._chunk.number + 1, epoch, self.sampler.draw(self._chunk_size))
            self._given = 0
        return self._chunk.n_tokens[self._given]

    def take(self) -> Window:
        n_tokens = self.next_size()
        assert n_tokens is not None
        samples = self._chunk.drawn[self._chunk.windows[self._given]]
        self._given += 1
        return Window(self._source, self._chunk.epoch, samples, n_tokens)

    def snapshot(self) -> StreamSnapshot:
        return self._chunk, self._given, self.sampler.state_dict()

    def state_dict(self, snapshot: StreamSnapshot) -> dict[str, Any]:
        """Return a position of this stream, JSON-ready."""
        chunk, given, sampler = snapshot
        return {
            "chunk": chunk.number,
            "epoch": chunk.epoch,
            "drawn": chunk.drawn.tolist() if given < len(chunk.windows) else [],
            "given": given if given < len(chunk.windows) else 0,
            "seed": self._seed,
            "sampler": without_arrays(sampler),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed = state["seed"]
        self.sampler.load_state_dict(state["sampler"])
        self._chunk = self._pack(state["chunk"], state["epoch"], np.array(state["drawn"], np.int64))
        self._given = state["given"]

    def _pack(self, number: int, epoch: int, drawn: Array) -> _Chunk:
        lengths = self._lengths[drawn]
        windows = PACKINGS[self._packing](lengths, self._capacity)
        if self.sampler.in_order:
            windows.sort(key=lambda window: int(window[0]))
        else:
            # Packing sorts the windows by sample length, and training must not see that order.
            windows = [windows[i] for i in permutation(len(windows), self._seed, self._source, number)]
        return _Chunk(number, epoch, drawn, windows, [int(lengths[window].sum()) for window in windows])

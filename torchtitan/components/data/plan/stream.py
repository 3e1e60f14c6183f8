"""The windows of one source: what its sampler draws, packed chunk by chunk."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchtitan.components.data.plan.packing import first_fit_decreasing, multipack, one_each
from torchtitan.components.data.plan.sampler import Sampler, permutation

Array = npt.NDArray[np.int64]

Packing = Literal["ffd", "multipack", "none"]
"""How samples are packed: first-fit-decreasing, fewest equally full windows, or one sample per window."""

PACKINGS: dict[Packing, Callable[[Array, int], list[Array]]] = {
    "ffd": first_fit_decreasing,
    "multipack": multipack,
    "none": one_each,
}


@dataclass(frozen=True, slots=True)
class Window:
    """The samples that share one window."""

    source: int
    """Number of the source."""
    epoch: int
    """Which reading of the source, from 0, the samples belong to."""
    samples: Array
    """Their numbers in the source, in the order in which they were drawn."""
    n_tokens: int
    """Positions that they take, of the window's capacity."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Samples that were drawn and packed together; they are numbered from 1."""

    number: int
    epoch: int
    drawn: Array
    windows: list[Array]
    n_tokens: list[int]


_NO_CHUNK = _Chunk(number=0, epoch=0, drawn=np.empty(0, np.int64), windows=[], n_tokens=[])

StreamSnapshot = tuple[_Chunk, int, dict[str, Any]]
"""A position: the chunk, how many of its windows have been given, and the sampler's state."""


class SourceStream:
    """The windows of one source, in order; see `Planner` for the arguments."""

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
        self._given = 0

    def next_size(self) -> int | None:
        """Tokens of the next window; None where all epochs are over."""
        if self._given == len(self._chunk.windows):
            if self._epochs is not None and self.sampler.epoch >= self._epochs:
                return None
            epoch = self.sampler.epoch
            self._chunk = self._pack(self._chunk.number + 1, epoch, self.sampler.draw(self._chunk_size))
            self._given = 0
        return self._chunk.n_tokens[self._given]

    def take(self) -> Window:
        """The next window, which must be there."""
        n_tokens = self.next_size()
        assert n_tokens is not None
        samples = self._chunk.drawn[self._chunk.windows[self._given]]
        self._given += 1
        return Window(self._source, self._chunk.epoch, samples, n_tokens)

    def snapshot(self) -> StreamSnapshot:
        """The position; it holds references only."""
        return self._chunk, self._given, self.sampler.state_dict()

    def state_dict(self, snapshot: StreamSnapshot) -> dict[str, Any]:
        """A position of this stream, JSON-ready."""
        chunk, given, sampler = snapshot
        return {
            "chunk": chunk.number,
            "epoch": chunk.epoch,
            "drawn": chunk.drawn.tolist() if given < len(chunk.windows) else [],
            "given": given if given < len(chunk.windows) else 0,
            "seed": self._seed,
            "sampler": {
                name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in sampler.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""
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
            # Packing leaves the windows sorted by the lengths of their samples, which training must not be.
            windows = [windows[i] for i in permutation(len(windows), self._seed, self._source, number)]
        return _Chunk(number, epoch, drawn, windows, [int(lengths[window].sum()) for window in windows])

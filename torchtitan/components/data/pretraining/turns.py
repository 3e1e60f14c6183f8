"""The order in which the datasets of a mixture with streams take turns, window by window."""

from collections.abc import Sequence

from torchtitan.components.data.plan.sampler import State
from torchtitan.components.data.pretraining.order import turns_of


class WeightedTurns:
    """Turns by weights, in a fixed cycle. The data ends with the first dataset.

    Args:
        weights: share of each dataset in the windows.
        epochs: passes over a dataset; None: without end.
    """

    is_empty = False
    """See `WholeEpochs.is_empty`; here, a dataset without windows ends the run by itself."""

    def __init__(self, weights: Sequence[float], epochs: int | None):
        self.epochs = epochs
        """Passes after which a dataset ends, or waits for the others."""
        self._weights = list(weights)
        self._cycle = turns_of(weights)
        self._turn = 0
        self._has_ended = False

    def next_set(self) -> int | None:
        """Return the dataset of the next window; None at the end of the data."""
        return None if self._has_ended else int(self._cycle[self._turn % len(self._cycle)])

    def add_window(self, number: int) -> None:
        """Count a window of a dataset."""
        self._turn += 1

    def end(self, number: int) -> int | None:
        """Note that a dataset has no windows left in `epochs`. Return the epoch, from 0, that all
        of them then begin; None: they do not."""
        self._has_ended = True
        return None

    def state_dict(self) -> State:
        return {"turn": self._turn, "weights": list(self._weights)}

    def load_state_dict(self, state: State) -> None:
        """Restore a position. Other weights begin a new cycle."""
        is_same = state.get("weights", self._weights) == self._weights
        self._turn = state.get("turn", 0) if is_same else 0


class WholeEpochs:
    """Turns in proportion to sizes; a dataset that has been read waits for the others, so that each
    is read once per epoch, however exact the sizes are.

    Args:
        sizes: size of each dataset, in any unit.
        epochs: passes over all datasets; None: without end.
        first_epoch: epoch to begin with, from 0.
    """

    def __init__(self, sizes: Sequence[int], epochs: int | None, first_epoch: int):
        self._sizes = sizes
        self._all_epochs = epochs
        self._begin(first_epoch)

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._n_read = [0] * len(self._sizes)
        self._waiting: set[int] = set()

    @property
    def epochs(self) -> int:
        """See `WeightedTurns`: the number of the present epoch, from 1."""
        return self._epoch + 1

    @property
    def is_empty(self) -> bool:
        """True if all datasets ended without a window in an epoch."""
        return len(self._waiting) == len(self._sizes)

    def next_set(self) -> int | None:
        """Return the dataset of the next window; None at the end of the data."""
        has_ended = self._all_epochs is not None and self._epoch >= self._all_epochs
        due = {
            number: (n_read + 1) / max(1, size)
            for number, (n_read, size) in enumerate(zip(self._n_read, self._sizes, strict=True))
            if number not in self._waiting and not has_ended
        }
        return min(due, key=lambda number: (due[number], number), default=None)

    def add_window(self, number: int) -> None:
        """Count a window of a dataset."""
        self._n_read[number] += 1

    def end(self, number: int) -> int | None:
        """See `WeightedTurns.end`. After an epoch without windows, the data ends."""
        self._waiting.add(number)
        if len(self._waiting) < len(self._sizes) or not any(self._n_read):
            return None
        self._begin(self._epoch + 1)
        return self._epoch

    def state_dict(self) -> State:
        return {"epoch": self._epoch, "read": list(self._n_read)}

    def load_state_dict(self, state: State) -> None:
        """Restore a position; a dataset that waited ends again."""
        self._begin(state.get("epoch", self._epoch))
        self._n_read = list(state.get("read", self._n_read))

"""Samplers: in which order the samples of a data set are drawn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from torchtitan.config import Configurable

Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepStatistics:
    """What a training step found out, reduced over all ranks: every rank is given the same."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Mean over the trained tokens of the step, in nats."""
    grad_norm: float
    """Norm of the gradient before it was clipped."""
    samples: Array
    """Numbers (n,) of the step's samples in the data set; empty unless the sampler `needs_sample_losses`."""
    sample_losses: npt.NDArray[np.float64]
    """Mean loss (n,) per trained token of each, in nats; empty likewise."""


class Sampler(Configurable):
    """Draws the samples of one data set, by their numbers 0 to `n_samples` - 1.

    Every rank has a sampler of its own that draws the same: what it does may depend on nothing but its arguments, the
    calls of `draw` and what it is given to `observe`. A subclass defines `draw`, `epoch`, `state_dict` and
    `load_state_dict`; one that learns from training overrides `observe` too.

    Args:
        config: how to draw.
        n_samples: samples in the data set, at least 1.
        seed: of this data set.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Order in which samples are drawn."""

    needs_sample_losses: ClassVar[bool] = False
    """Whether `observe` reads the loss of each sample, which costs the training something."""

    def __init__(self, config: Config, *, n_samples: int, seed: int):
        super().__init__(config)
        assert n_samples >= 1
        self.n_samples = n_samples
        self.seed = seed

    @property
    def in_order(self) -> bool:
        """Whether the order drawn is to be kept; else windows that are packed together are shuffled."""
        return False

    @property
    def adaptive(self) -> bool:
        """Whether what is drawn depends on the training."""
        return type(self).observe is not Sampler.observe

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the sample that `draw` returns next."""
        raise NotImplementedError

    def draw(self, n: int) -> Array:
        """The next 1 to `n` samples; fewer than `n` only where an epoch ends: the next call begins the next epoch."""
        raise NotImplementedError

    def observe(self, statistics: StepStatistics) -> None:
        """Learn from a training step; `statistics.samples` are numbers in this data set.

        It is called in the order of the steps, and not before the samples of later steps that were prepared ahead have
        been drawn: see `Planner`.
        """

    def state_dict(self) -> dict[str, Any]:
        """All that decides what is drawn from now on, JSON-ready, but for numpy arrays as values: they are saved as
        lists. Called for every batch, so that what grows with the data set is best such an array, and no copy; later
        calls must not change what it returned."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw on from a saved state, in which arrays are lists."""
        raise NotImplementedError


class ShuffleSampler(Sampler):
    """Every sample once per epoch, in an order that is a function of the seed and the epoch."""

    @dataclass(kw_only=True, slots=True)
    class Config(Sampler.Config):
        """Order in which samples are drawn."""

        shuffle: bool = True
        """Another random order in each epoch; False: that of the data."""

    config: Config

    def __init__(self, config: Config, *, n_samples: int, seed: int):
        super().__init__(config, n_samples=n_samples, seed=seed)
        self._epoch = 0
        self._drawn = 0
        self._order = self._order_of_epoch()

    @property
    def in_order(self) -> bool:
        return not self.config.shuffle

    @property
    def epoch(self) -> int:
        return self._epoch

    def draw(self, n: int) -> Array:
        samples = self._order[self._drawn : self._drawn + n]
        self._drawn += len(samples)
        if self._drawn == self.n_samples:
            self._epoch, self._drawn = self._epoch + 1, 0
            self._order = self._order_of_epoch()
        return samples

    def _order_of_epoch(self) -> Array:
        if not self.config.shuffle:
            return np.arange(self.n_samples)
        return permutation(self.n_samples, self.seed, self._epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "epoch": self._epoch, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The seed of the saved order: with another, some samples of this epoch would come twice and some never.
        self.seed, self._epoch, self._drawn = state["seed"], state["epoch"], state["drawn"]
        self._order = self._order_of_epoch()


def permutation(size: int, *key: int) -> Array:
    """A pseudo-random permutation of `range(size)` that is a function of the key's numbers alone.

    It is the order of a bit generator's raw numbers, which numpy promises never to change; `Generator.permutation` has
    no such promise.
    """
    raw = np.random.PCG64(np.random.SeedSequence([part % (1 << 64) for part in key])).random_raw(size)
    return np.argsort(raw, kind="stable")


def without_arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with lists in place of numpy arrays."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}

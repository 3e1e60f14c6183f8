"""Samplers, which define the order of samples in a dataset."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from torchtitan.config import Configurable

Array = npt.NDArray[np.int64]

State = dict[str, Any]
"""Position or settings of an object as JSON-serializable values, by name. Its `load_state_dict`
gets what its `state_dict` returned, and knows the type of each value."""


@dataclass(frozen=True)
class StepStatistics:
    """Statistics of a training step, numbered from 1, reduced over all ranks."""

    step: int
    loss: float
    """Mean per trained token, in nats."""
    grad_norm: float
    """Gradient norm before clipping."""
    samples: Array
    """Numbers (n,) of the step's samples in the dataset; empty unless the sampler
    `needs_sample_losses` or `needs_sample_rewards`."""
    sample_losses: npt.NDArray[np.float64]
    """Mean loss (n,) per trained token of each sample, in nats; empty unless the sampler
    `needs_sample_losses`."""
    sample_rewards: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Mean reward (n,) of the answers to each sample; empty unless the sampler
    `needs_sample_rewards`."""

    def of(self, first: int, end: int) -> "StepStatistics":
        """Return the statistics of the samples from `first` to before `end`, numbered from 0."""
        is_here = (self.samples >= first) & (self.samples < end)
        losses, rewards = (
            values[is_here] if len(values) else values
            for values in (self.sample_losses, self.sample_rewards)
        )
        return replace(
            self,
            samples=self.samples[is_here] - first,
            sample_losses=losses,
            sample_rewards=rewards,
        )


class Sampler(Configurable):
    """Draws the samples of one dataset, numbered from 0 to `n_samples` - 1.

    Each rank has its own sampler, and all must draw the same samples: draws may depend only on the
    arguments, the calls of `draw`, and the input of `observe`. Subclasses define `draw`, `epoch`,
    `state_dict` and `load_state_dict`, and override `observe` to adapt to training.

    Args:
        n_samples: samples in the dataset, at least 1.
        seed: random seed for this dataset.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Order in which samples are drawn."""

    needs_sample_losses: ClassVar[bool] = False
    """True if `observe` needs per-sample losses, which slow down training."""

    needs_sample_rewards: ClassVar[bool] = False
    """True if `observe` needs the rewards of sampled answers."""

    def __init__(self, config: Config, *, n_samples: int, seed: int):
        super().__init__(config)
        assert n_samples >= 1
        self.n_samples = n_samples
        self.seed = seed

    @property
    def in_order(self) -> bool:
        """True to keep the drawing order instead of shuffling the windows of a chunk."""
        return False

    @property
    def adaptive(self) -> bool:
        """True if draws depend on training."""
        return type(self).observe is not Sampler.observe

    @property
    def epoch(self) -> int:
        """Epoch, from 0, of the next sample."""
        raise NotImplementedError

    def draw(self, n: int) -> Array:
        """Return the next 1 to `n` samples, fewer than `n` only at the end of an epoch."""
        raise NotImplementedError

    def observe(self, statistics: StepStatistics) -> None:
        """Adapt to a training step; `statistics.samples` are numbers in this dataset. Called in
        step order, after the samples prefetched for later steps have been drawn; see `Planner`."""

    def state_dict(self) -> State:
        """Return the complete state, JSON-serializable except for numpy arrays as values. This is
        called for every batch, so return large state as arrays without copying, and do not modify
        the arrays later."""
        raise NotImplementedError

    def load_state_dict(self, state: State) -> None:
        """Restore a saved state, with lists instead of arrays."""
        raise NotImplementedError


class ShuffleSampler(Sampler):
    """Draws every sample once per epoch, in an order that depends only on seed and epoch."""

    @dataclass(kw_only=True, slots=True)
    class Config(Sampler.Config):
        """Order in which samples are drawn."""

        shuffle: bool = True
        """Use a new random order in each epoch; False: keep the order of the data."""

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

    def state_dict(self) -> State:
        return {"seed": self.seed, "epoch": self._epoch, "drawn": self._drawn}

    def load_state_dict(self, state: State) -> None:
        # With a different seed, samples of this epoch would be repeated or skipped.
        self.seed = state["seed"]
        self._epoch = state["epoch"]
        self._drawn = state["drawn"]
        self._order = self._order_of_epoch()


def permutation(size: int, *key: int) -> Array:
    """Return a pseudo-random permutation of `range(size)` that depends only on `key`. Sorts raw
    numbers of a bit generator, which are stable across numpy versions, unlike
    `Generator.permutation`."""
    raw = np.random.PCG64(np.random.SeedSequence([part % (1 << 64) for part in key])).random_raw(
        size
    )
    return np.argsort(raw, kind="stable")


def arrays_to_lists(values: Mapping[str, object]) -> State:
    """Return a copy with numpy arrays converted to lists."""
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }

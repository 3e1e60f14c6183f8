"""Samplers that draw some samples more often than others, by their results in training."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from torchtitan.components.data.plan.sampler import Array, Sampler, State, StepStatistics
from torchtitan.tools.errors import require

_UNSEEN = -1.0

Values = npt.NDArray[np.float64]


class WeightedSampler(Sampler):
    """Draw samples with a chance that is proportional to their weight, mixed with a uniform chance.
    A weight follows from the sample's estimate, a moving average of values that training has
    measured, at least 0. One draw has no duplicates. The number of draws in an epoch is the size of
    the dataset: some samples appear more than once, some not at all."""

    @dataclass(kw_only=True, slots=True)
    class Config(Sampler.Config):
        """Distribution of the draws."""

        explore: float = 0.1
        """Weight of the uniform distribution in the mixture, from 0 to 1."""

        momentum: float = 0.5
        """Weight of a sample's earlier estimate when it is measured again, from 0 to below 1."""

        def validate(self) -> None:
            require(
                0 <= self.explore <= 1, "--dataloader.sampler.explore", self.explore, "from 0 to 1"
            )
            require(
                0 <= self.momentum < 1,
                "--dataloader.sampler.momentum",
                self.momentum,
                "from 0 to below 1",
            )

    config: Config

    def __init__(self, config: Config, *, n_samples: int, seed: int):
        super().__init__(config, n_samples=n_samples, seed=seed)
        self._drawn = 0  # samples drawn over all epochs
        self._estimates = np.full(n_samples, _UNSEEN)

    @property
    def epoch(self) -> int:
        return self._drawn // self.n_samples

    def weights(self, estimates: Values, is_seen: npt.NDArray[np.bool_]) -> Values:
        """Return the weights of all samples; `estimates` of unseen ones are arbitrary."""
        raise NotImplementedError

    def chances(self) -> Values:
        """Return the probability that each sample is drawn first, shape (n_samples,)."""
        weights = self.weights(self._estimates, self._estimates >= 0)
        total = weights.sum()
        weighted = weights / total if total > 0 else np.full(self.n_samples, 1 / self.n_samples)
        explore = self.config.explore
        chances: Values = (1 - explore) * weighted + explore / self.n_samples
        return chances

    def draw(self, n: int) -> Array:
        """Draw the next samples, distinct within a call, as the first arrivals of exponential
        clocks at the rates of their chances (Efraimidis and Spirakis, 2006)."""
        n = min(n, self.n_samples - self._drawn % self.n_samples)
        raw = np.random.PCG64(np.random.SeedSequence((self.seed, self._drawn))).random_raw(
            self.n_samples
        )
        uniform = ((raw >> 11) + 0.5) * 2.0**-53
        with np.errstate(divide="ignore"):  # a sample with chance 0 never arrives
            times = -np.log(uniform) / self.chances()
        # Those fill a draw that has too few others, in random order.
        samples = np.lexsort((uniform, times))[:n]
        self._drawn += n
        return samples

    def measured(self, samples: Array, values: Values) -> None:
        """Update the estimates of samples by new values."""
        before, momentum = self._estimates[samples], self.config.momentum
        self._estimates = self._estimates.copy()  # saved states keep the old array
        self._estimates[samples] = np.where(
            before < 0, values, momentum * before + (1 - momentum) * values
        )

    def state_dict(self) -> State:
        return {"seed": self.seed, "drawn": self._drawn, "estimates": self._estimates}

    def load_state_dict(self, state: State) -> None:
        self.seed = state["seed"]
        self._drawn = state["drawn"]
        self._estimates = np.array(state["estimates"])


class SuccessSampler(WeightedSampler):
    """Draw prompts that the model answers correctly about half of the time more often: the weight
    of a prompt with the success rate p is `p (1 - p)`, the variance of a reward of 0 or 1 (Foster
    et al., arXiv:2502.12272). p is a moving average of the prompt's mean reward, cut to 0 to 1;
    prompts without a reward so far have the largest weight. The rewards of a step change the draws
    of later chunks."""

    needs_sample_rewards: ClassVar[bool] = True

    def weights(self, estimates: Values, is_seen: npt.NDArray[np.bool_]) -> Values:
        rates = np.where(is_seen, estimates, 0.5)
        return rates * (1 - rates)

    def observe(self, statistics: StepStatistics) -> None:
        self.measured(statistics.samples, statistics.sample_rewards.clip(0, 1))

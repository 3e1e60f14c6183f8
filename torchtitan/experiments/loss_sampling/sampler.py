"""The sampler of this experiment."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from torchtitan.components.data.plan.sampler import Array, Sampler, StepStatistics
from torchtitan.config.sections import require_at_least
from torchtitan.tools.errors import require

_UNSEEN = -1.0


class LossSampler(Sampler):
    """Draw samples by their recent loss; see the package."""

    @dataclass(kw_only=True, slots=True)
    class Config(Sampler.Config):
        """Distribution of the draws."""

        power: float = 1.0
        """The chance of a sample is proportional to its loss to this power; 0: uniform."""

        explore: float = 0.1
        """Weight of the uniform distribution in the mixture, from 0 to 1."""

        momentum: float = 0.5
        """Weight of a sample's earlier loss when it is measured again, from 0 to below 1."""

        def validate(self) -> None:
            require_at_least(0, dataloader__sampler__power=self.power)
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
    needs_sample_losses: ClassVar[bool] = True

    def __init__(self, config: Config, *, n_samples: int, seed: int):
        super().__init__(config, n_samples=n_samples, seed=seed)
        self._drawn = 0  # samples drawn over all epochs
        self._losses = np.full(n_samples, _UNSEEN)

    @property
    def epoch(self) -> int:
        return self._drawn // self.n_samples

    def chances(self) -> np.typing.NDArray[np.float64]:
        """Return the probability that each sample is drawn first, shape (n_samples,)."""
        seen = self._losses >= 0
        losses = np.where(seen, self._losses, self._losses[seen].mean() if seen.any() else 1.0)
        weights = losses**self.config.power
        total = weights.sum()
        by_loss = weights / total if total > 0 else np.full(self.n_samples, 1 / self.n_samples)
        return (1 - self.config.explore) * by_loss + self.config.explore / self.n_samples

    def draw(self, n: int) -> Array:
        """Draw the next samples, distinct within a call, as the first arrivals of exponential
        clocks at the rates of their chances (Efraimidis and Spirakis, 2006)."""
        n = min(n, self.n_samples - self._drawn % self.n_samples)
        raw = np.random.PCG64(np.random.SeedSequence((self.seed, self._drawn))).random_raw(
            self.n_samples
        )
        uniform = ((raw >> 11) + 0.5) * 2.0**-53
        with np.errstate(divide="ignore"):  # a sample with chance 0 never arrives
            samples = np.argsort(-np.log(uniform) / self.chances(), kind="stable")[:n]
        self._drawn += n
        return samples

    def observe(self, statistics: StepStatistics) -> None:
        samples, losses = statistics.samples, statistics.sample_losses
        before, momentum = self._losses[samples], self.config.momentum
        self._losses = self._losses.copy()  # saved states keep the old array
        self._losses[samples] = np.where(
            before < 0, losses, momentum * before + (1 - momentum) * losses
        )

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "drawn": self._drawn, "losses": self._losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        self._drawn = state["drawn"]
        self._losses = np.array(state["losses"])

"""The sampler of this experiment."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from torchtitan.components.data.plan.sampler import StepStatistics
from torchtitan.components.data.plan.weighted_sampler import Values, WeightedSampler
from torchtitan.config.sections import require_at_least


class LossSampler(WeightedSampler):
    """Draw samples by their recent loss; see the package."""

    @dataclass(kw_only=True, slots=True)
    class Config(WeightedSampler.Config):
        """Distribution of the draws."""

        power: float = 1.0
        """The chance of a sample is proportional to its loss to this power; 0: uniform."""

        def validate(self) -> None:
            WeightedSampler.Config.validate(self)
            require_at_least(0, dataloader__sampler__power=self.power)

    config: Config
    needs_sample_losses: ClassVar[bool] = True

    def weights(self, estimates: Values, is_seen: npt.NDArray[np.bool_]) -> Values:
        """Return the weights of losses. An unseen sample has the mean loss of the seen ones."""
        mean = estimates[is_seen].mean() if is_seen.any() else 1.0
        weights: Values = np.where(is_seen, estimates, mean) ** self.config.power
        return weights

    def observe(self, statistics: StepStatistics) -> None:
        self.measured(statistics.samples, statistics.sample_losses)

    def load_state_dict(self, state: dict[str, object]) -> None:
        # as earlier versions have named them
        super().load_state_dict({"estimates": state.get("losses"), **state})

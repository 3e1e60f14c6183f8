"""Rectified flow (Liu et al. 2022, arXiv:2209.03003): straight paths from data to noise.

At time t from 0 to 1, a path is at x_t = (1 - t) x + t e, for data x and standard normal noise e.
Its velocity is e - x, which the model predicts from x_t and t; FLUX has the same direction of time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.config import Configurable
from torchtitan.config.configurable import builds
from torchtitan.tools.errors import require

N_BUCKETS = 4
"""Equal parts of the time from 0 to 1 whose losses metrics report."""


class FlowMatchingLoss(Configurable):
    """Mean squared error of the velocity, at times with a logit-normal distribution (Esser et al.
    2024, arXiv:2403.03206, 3.1), without conditions for some samples, for classifier-free
    guidance (Ho and Salimans 2022, arXiv:2207.12598).

    It draws nothing: it takes uniform random numbers, so whoever draws them decides what a repeated
    batch, a resumed run or a validation repeats.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Rectified flow."""

        time_mean: float = 0.0
        """Mean of log(t / (1 - t)); above 0: more noise."""

        time_std: float = 1.0
        """Standard deviation of log(t / (1 - t))."""

        dropped_conditions: float = 0.1
        """Share of samples that are trained without their condition, for guidance."""

        @builds(lambda: FlowMatchingLoss)
        def build(self) -> object:
            """Build the loss."""

        def validate(self) -> None:
            require(self.time_std > 0, "--loss.time_std", self.time_std, "above 0")
            share = self.dropped_conditions
            require(0 <= share < 1, "--loss.dropped_conditions", share, "from 0 to below 1")

    config: Config

    def times(self, uniform_B: Tensor) -> Tensor:
        """Map uniform numbers between 0 and 1, exclusive, to times, float32 (B,)."""
        normal_B = torch.special.ndtri(uniform_B.double())
        return torch.sigmoid(self.config.time_mean + self.config.time_std * normal_B).float()

    def is_dropped(self, uniform_B: Tensor) -> Tensor:
        """Map uniform numbers to whether a sample loses its condition, bool (B,)."""
        return uniform_B < self.config.dropped_conditions

    @staticmethod
    def at_time(x: Tensor, noise: Tensor, times_B: Tensor) -> Tensor:
        """Return the points of paths from data to noise, both (B, …), at times (B,)."""
        t = times_B.view(-1, *(1,) * (x.dim() - 1))
        return (1 - t) * x + t * noise

    @staticmethod
    def losses(velocity: Tensor, x: Tensor, noise: Tensor) -> Tensor:
        """Return the mean squared error of each sample's velocity, all (B, …), float32 (B,)."""
        return (velocity.float() - (noise - x).float()).square().flatten(1).mean(dim=1)


def buckets(times_B: Tensor) -> Tensor:
    """Return in which of `N_BUCKETS` equal parts of the time each sample is, int64 (B,)."""
    return (times_B * N_BUCKETS).long().clamp(0, N_BUCKETS - 1)

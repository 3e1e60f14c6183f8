"""Assignment of samples to windows, planned from the samples' lengths alone."""

from torchtitan.components.data.plan.mixture import Mixture
from torchtitan.components.data.plan.packing import (
    Packing,
    Window,
    first_fit_decreasing,
    multipack,
    no_packing,
)
from torchtitan.components.data.plan.planner import Planner, PlanOptions, Snapshot
from torchtitan.components.data.plan.sampler import Sampler, ShuffleSampler, StepStatistics
from torchtitan.components.data.plan.weighted_sampler import SuccessSampler, WeightedSampler

__all__ = [
    "Mixture",
    "Packing",
    "PlanOptions",
    "Planner",
    "Sampler",
    "ShuffleSampler",
    "Snapshot",
    "StepStatistics",
    "SuccessSampler",
    "WeightedSampler",
    "Window",
    "first_fit_decreasing",
    "multipack",
    "no_packing",
]

"""What the data loaders of preference and prompt data share: samples in windows of their own, never packed."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from torchtitan.components.data.finetuning.planned_loader import PlannedDataLoader
from torchtitan.components.data.plan import Planner, Sampler

DRAWN_AT_A_TIME = 1024
"""Samples that a sampler draws at a time; nothing else depends on it, since samples share no windows."""


class ExampleDataLoader(PlannedDataLoader):
    """Samples each in a row of a batch; see `PlannedDataLoader` for arguments, order and position."""

    @dataclass(kw_only=True, slots=True)
    class Config(PlannedDataLoader.Config):
        """Examples of a fine-tuning method."""

        too_long: Literal["drop", "truncate_left", "error"] = "drop"
        """Examples beyond the sequence length: drop, truncate_left (cuts the beginning of the prompt), or error."""

    config: Config

    def plan(self, samplers: list[Sampler], *, epochs: int | None, windows_per_step: int, **order: Any) -> Planner:
        lengths = [np.ones(of_set.n_samples, np.int64) for of_set in self.samples.sets]
        return Planner(lengths, 1, samplers, packing="none", chunk=DRAWN_AT_A_TIME, epochs=epochs, **order)

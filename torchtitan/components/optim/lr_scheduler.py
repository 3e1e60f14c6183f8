"""Learning-rate schedule with warm-up, stable and decay phases (WSD, arXiv:2404.06395)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.components.optim.rate_points import Between, factor_at, parse_points
from torchtitan.config import Configurable
from torchtitan.config.configurable import builds
from torchtitan.config.ranges import check_ranges
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger


class LRScheduler(Configurable):
    """Sets the learning rate of every parameter group to its peak rate times `factor(steps_taken)`.

    A subclass with another curve overrides `factor`. A torch optimizer's peak rates are the
    `initial_lr` of its groups, or their `lr` when the schedule is built. `training_steps` is the
    schedule's length, unless `total_steps` is set. If `unit` is tokens, steps are tokens everywhere
    in this class, and an optimizer step has many tokens.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Learning-rate schedule."""

        unit: Literal["steps", "tokens"] = "steps"
        """Unit of warmup_steps and total_steps. With tokens, the curve does not depend on batch
        sizes."""

        warmup_steps: int = 200
        """Steps over which the rate rises linearly to its peak."""

        warmup_ratio: float | None = None
        """Warm-up as a fraction of the schedule, such as 0.03, rounded up to whole steps; it
        replaces warmup_steps."""

        warmup_from_zero: bool = False
        """Begin the warm-up with a step of rate 0, and reach the peak a step later, as transformers
        does. False: begin with peak / warmup_steps."""

        total_steps: int | None = None
        """Length of the schedule. None: the length of the run. Set it to stop a run early on the
        same curve."""

        decay_ratio: float | None = None
        """Fraction of the schedule, at its end, over which the rate decays. None: everything after
        the warm-up."""

        decay_type: Literal["linear", "sqrt", "cosine", "power"] = "linear"
        """Curve of the decay: 1 - p, 1 - sqrt(p), (1 + cos(pi p)) / 2 or (1 - p) ** decay_power,
        with p from 0 to 1."""

        decay_power: float = 2.0
        """Exponent of the decay_type power."""

        min_lr_factor: float = 0.0
        """Final rate as a fraction of the peak."""

        points: list[str] = field(default_factory=list)
        """Rates after numbers of steps, as fractions of the peak: 1000:0.5 2000:0.1. They replace
        the decay; the warm-up multiplies them."""

        points_between: Between = "constant"
        """Rates between two points: the earlier point's, or on a line."""

        @builds(lambda: LRScheduler)
        def build(self) -> object:
            """Build the schedule of an optimizer, whose rates it sets."""

        def validate(self) -> None:
            check_ranges("lr_scheduler", self)
            parse_points("--lr_scheduler.points", self.points)

    config: Config

    def __init__(
        self, config: Config, *, optimizer: Optimizer | torch.optim.Optimizer, training_steps: int
    ):
        super().__init__(config)
        self.optimizer = optimizer
        self._points = parse_points("--lr_scheduler.points", config.points)
        if self._points and (config.min_lr_factor or config.decay_ratio is not None):
            logger.warning(
                "--lr_scheduler.points replace the decay: decay_ratio and min_lr_factor have no "
                "effect"
            )
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.steps_taken = 0
        self.total_steps = 0
        self.step_size = 1
        self.set_length(training_steps)

    def set_length(self, training_steps: int, *, step_size: int = 1) -> None:
        """End the schedule after `training_steps`, unless `total_steps` is set. `step_size`: as in
        `step`."""
        config, before = self.config, self.total_steps
        self.step_size = step_size
        self.total_steps = config.total_steps or training_steps
        warmup_steps = (
            config.warmup_steps
            if config.warmup_ratio is None
            else math.ceil(self.total_steps * config.warmup_ratio)
        )
        self.warmup_steps = min(warmup_steps, self.total_steps)
        if self.warmup_steps < warmup_steps and self.total_steps != before:
            logger.warning(
                f"--lr_scheduler.warmup_steps ({config.warmup_steps}) exceeds the length of the "
                f"schedule ({self.total_steps}): the learning rate rises until the last step and "
                "never decays"
            )
        after_warmup = self.total_steps - self.warmup_steps
        decay_steps = (
            after_warmup
            if config.decay_ratio is None
            else round(self.total_steps * config.decay_ratio)
        )
        self.decay_steps = min(decay_steps, after_warmup)
        self._set_steps_taken(self.steps_taken)

    def factor(self, steps_taken: int) -> float:
        """Return the fraction of the peak rate for the step after `steps_taken` steps."""
        warmed_up = 1.0
        if steps_taken < self.warmup_steps:
            ahead = 0 if self.config.warmup_from_zero else self.step_size
            warmed_up = min(steps_taken + ahead, self.warmup_steps) / self.warmup_steps
        if self._points:
            return warmed_up * factor_at(self._points, steps_taken, self.config.points_between)
        if steps_taken < self.warmup_steps:
            return warmed_up
        decay_start = self.total_steps - self.decay_steps
        if steps_taken < decay_start or self.decay_steps == 0:
            return 1.0
        progress = min((steps_taken - decay_start) / self.decay_steps, 1.0)
        curve = {
            "linear": 1 - progress,
            "sqrt": 1 - math.sqrt(progress),
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
            "power": (1 - progress) ** self.config.decay_power,
        }[self.config.decay_type]
        return self.config.min_lr_factor + (1 - self.config.min_lr_factor) * curve

    @property
    def lr(self) -> float:
        """Learning rate of the next step for parameters outside any group, or of a torch
        optimizer's first group."""
        if isinstance(self.optimizer, torch.optim.Optimizer):
            return float(self.optimizer.param_groups[0]["lr"])
        return self.optimizer.config.lr * self.factor(self.steps_taken)

    def check_step(self, n_steps: int) -> None:
        """Compute what `step` will compute, so that an error of an overridden `factor` ends the run
        before the update, when the last complete step can be saved."""
        self.factor(self.steps_taken + n_steps)

    def step(self, n_steps: int = 1, *, step_size: int = 1) -> None:
        """Advance by `n_steps`, and set the learning rates of the next step, which advances by
        `step_size`."""
        self.step_size = step_size
        self._set_steps_taken(self.steps_taken + n_steps)

    def _set_steps_taken(self, steps_taken: int) -> None:
        self.steps_taken = steps_taken
        for group in self.optimizer.param_groups:
            rate = group["initial_lr"] * self.factor(steps_taken)
            if points := group.get("lr_points"):
                rate *= factor_at(points, steps_taken, self.config.points_between)
            group["lr"] = rate

    def state_dict(self) -> dict[str, object]:
        """Return the number of steps taken and its unit; everything else comes from the
        configuration."""
        return {"steps_taken": self.steps_taken, "unit": self.config.unit}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state. Raise `UserError` if it counts in another unit."""
        if (unit := state_dict.get("unit", "steps")) != self.config.unit:
            raise UserError(
                f"--lr_scheduler.unit {self.config.unit}: the run to resume has "
                f"--lr_scheduler.unit {unit}"
            )
        self._set_steps_taken(state_dict["steps_taken"])

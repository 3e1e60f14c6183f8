"""`LossScale`: factor of the loss in float16, whose small gradients would otherwise be 0."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchtitan.config import Configurable
from torchtitan.config.configurable import builds
from torchtitan.config.ranges import check_ranges
from torchtitan.distributed.gradients import divide_gradients
from torchtitan.tools.errors import UserError


class LossScale(Configurable):
    """Multiplies the loss of every micro-batch, and divides the gradients of the step before they
    are clipped (Micikevicius et al. 2018, arXiv:1710.03740). The factor changes as in
    `torch.amp.GradScaler`. It depends only on the gradient norm, which is equal on all ranks; its
    state belongs in checkpoints.

        (loss * scale.value).backward()     # each micro-batch
        scale.unscale(parameters)
        norm = clip_grad_norm(parameters, 1.0)
        if norm.isfinite():
            optimizer.step()
        scale.update(is_finite=bool(norm.isfinite()))

    Args:
        dtype: type of the forward and backward passes. Unless it is float16, the factor is always
            1.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Factor of the loss, only with --training.mixed_precision_param float16."""

        initial: float = 65536.0
        """Factor in the first step."""

        growth: float = 2.0
        """The factor grows by this factor after `interval` steps in a row with finite gradients."""

        backoff: float = 0.5
        """The factor shrinks by this factor after a step whose gradients are not finite; the step
        is skipped."""

        interval: int = 2000
        """Steps in a row with finite gradients before the factor grows."""

        @builds(lambda: LossScale)
        def build(self) -> object:
            """Build the factor of a run."""

        def validate(self) -> None:
            check_ranges("loss_scale", self)

        def check_run(self, run: Any) -> None:
            """Raise `UserError` if a run, a `Trainer.Config`, in float16 uses gradients before they
            can be divided."""
            dtype = run.training.mixed_precision_param
            if dtype != "float16":
                return
            if run.optimizer.early_step_in_backward:
                raise UserError(
                    "--optimizer.early_step_in_backward uses gradients before they can be divided "
                    f"by the loss scale of --training.mixed_precision_param {dtype}; set bfloat16 "
                    "or float32, or disable it"
                )
            if run._owner.has_own_backward:
                raise UserError(
                    f"{run._owner.__name__} overrides forward_backward_step, which would see "
                    f"gradients times the loss scale of --training.mixed_precision_param {dtype}; "
                    "set bfloat16 or float32"
                )

    config: Config

    def __init__(self, config: Config, *, dtype: torch.dtype):
        super().__init__(config)
        self.is_on = dtype == torch.float16
        self.value = config.initial if self.is_on else 1.0
        self.is_unscaled = not self.is_on
        """True if the gradients of the step in progress are divided."""
        self._finite_in_a_row = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide all gradients by the factor, in place."""
        if self.is_on:
            divide_gradients(parameters, torch.tensor(self.value))
            self.is_unscaled = True

    def update(self, *, is_finite: bool) -> None:
        """Set the factor of the next step after one whose gradients are finite or not."""
        if not self.is_on:
            return
        self.is_unscaled = False
        config = self.config
        if not is_finite:
            self.value *= config.backoff
            self._finite_in_a_row = 0
            return
        self._finite_in_a_row += 1
        if self._finite_in_a_row == config.interval:
            self._finite_in_a_row = 0
            grown = self.value * config.growth
            # GradScaler keeps the factor, float32, if it would overflow.
            if grown <= torch.finfo(torch.float32).max:
                self.value = grown

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value, "finite_in_a_row": self._finite_in_a_row}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.value = state_dict["value"]
        self._finite_in_a_row = state_dict["finite_in_a_row"]

"""`WeightAverage`: the exponential moving average (EMA) of a model's trained weights."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.components.optim.run_sections import RunSections
from torchtitan.config import Configurable
from torchtitan.config.configurable import builds
from torchtitan.config.ranges import check_ranges
from torchtitan.distributed.initialize import canonical_name
from torchtitan.tools.errors import UserError


class WeightAverage(Configurable):
    """Averages of the trained parameters in float32, sharded like these. Call `reset` once the
    weights are loaded, and `update` after each optimizer step; its state belongs in checkpoints.

    Update number n, from 1, is `average += (1 - d) * (weight - average)` with d = min(decay, n / (9
    + n)), which lets early averages forget the initial weights (`num_updates` of TensorFlow's
    `ExponentialMovingAverage`).

    Args:
        model_parts: the model, or this rank's stages of it.
        follow: refreshes state derived from the weights after they have been replaced.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Exponential moving average of the weights."""

        decay: float | None = None
        """Weight of the old average in each step, such as 0.999, and less in the first steps. None:
        no average."""

        for_validation: bool = False
        """Validate with the averages, also for checkpoint.keep_best."""

        for_export: bool = False
        """Write the averages with checkpoint.last_save_in_hf or last_save_model_only."""

        @builds(lambda: WeightAverage)
        def build(self) -> object:
            """Build the averages of a model's parts."""

        def validate(self) -> None:
            check_ranges("ema", self)
            for option in ("for_validation", "for_export"):
                if getattr(self, option) and self.decay is None:
                    raise UserError(f"--ema.{option} needs --ema.decay, such as 0.999")

        def check_run(self, run: RunSections) -> None:
            """Raise `UserError` if a run, a `Trainer.Config`, never writes the averages that it
            should write."""
            if self.for_export and run.checkpoint.last_kind == "full":
                raise UserError(
                    "--ema.for_export needs --checkpoint.last_save_in_hf or "
                    "--checkpoint.last_save_model_only; full checkpoints contain weights and "
                    "averages"
                )

    config: Config

    def __init__(
        self,
        config: Config,
        model_parts: Sequence[nn.Module],
        follow: Callable[[], object] = lambda: None,
    ):
        super().__init__(config)
        self._follow = follow
        named = (
            [pair for part in model_parts for pair in part.named_parameters()]
            if config.decay is not None
            else []
        )
        # Two pipeline stages of this rank may have copies of a parameter, with the same name.
        self._names = [canonical_name(name) for name, parameter in named if parameter.requires_grad]
        self._weights = [parameter for _, parameter in named if parameter.requires_grad]
        self.averages = [
            torch.empty_like(weight, dtype=torch.float32, requires_grad=False)
            for weight in self._weights
        ]
        self.n_updates = 0

    def reset(self) -> None:
        """Set the averages to the current weights."""
        self.n_updates = 0
        _copy(self._weights, self.averages)

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages toward the current weights."""
        if self.config.decay is None:
            return
        self.n_updates += 1
        decay = min(self.config.decay, self.n_updates / (9 + self.n_updates))
        for average, weight in zip(self.averages, self._weights, strict=True):
            average.mul_(decay).add_(weight, alpha=1 - decay)

    @contextlib.contextmanager
    def applied(self, wanted: bool) -> Iterator[None]:
        """Replace the weights by the averages in the block if `wanted`; afterwards, they have their
        exact values."""
        if not wanted:
            yield
            return
        kept = [weight.detach().clone() for weight in self._weights]
        try:
            _copy(self.averages, self._weights)
            self._follow()
            yield
        finally:
            _copy(kept, self._weights)
            self._follow()

    def state_dict(self) -> dict[str, object]:
        """Return canonical name → average, without copying, and the number of updates."""
        return {**dict(zip(self._names, self.averages, strict=True)), "n_updates": self.n_updates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.n_updates = state_dict["n_updates"]
        _copy([state_dict[name] for name in self._names], self.averages)


@torch.no_grad()
def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)

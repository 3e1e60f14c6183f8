"""`SpikeGuard`: decides which steps are spikes, and counts skipped steps."""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.components.optim.run_sections import RunSections
from torchtitan.config import Configurable
from torchtitan.config.configurable import builds
from torchtitan.config.ranges import check_ranges
from torchtitan.tools.errors import UserError

_COUNTS = ("in_a_row", "n_skipped", "returned_to")


class SpikeGuard(Configurable):
    """Compares each step with the last `window` steps taken. It needs only numbers that are equal
    on all ranks, so all ranks decide alike, and its state belongs in checkpoints.

        if spike := guard.spike(loss, grad_norm):   # before the optimizer step
            guard.count_skipped()
        else:
            optimizer.step()
            guard.record(loss, grad_norm)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Steps to skip, and the response to many of them."""

        threshold: float | None = None
        """Skip a step whose loss or gradient norm exceeds its mean over `window` steps by more than
        this many standard deviations, without changing weights or optimizer state. None: take every
        finite step."""

        window: int = 128
        """Number of most recent steps taken that define mean and standard deviation. Before this
        number of steps, none is a spike; skipped steps do not count."""

        max_in_a_row: int = 10
        """Skipped steps in a row, spikes or not finite (training.on_nonfinite skip), that lead to
        `action`."""

        action: Literal["stop", "leave_out", "repeat"] = "stop"
        """Response to `max_in_a_row` skipped steps: `stop` ends the run. The others load the newest
        checkpoint from before these steps and continue: `leave_out` skips the data since the
        checkpoint, `repeat` trains on it again. A second return to the same checkpoint ends the
        run."""

        advance_schedule: bool = True
        """Also advance the learning-rate schedule with skipped and undone steps, so that it ends
        with the run."""

        @builds(lambda: SpikeGuard)
        def build(self) -> object:
            """Build the guard."""

        def validate(self) -> None:
            check_ranges("spikes", self)

        def check_run(self, run: RunSections) -> None:
            """Raise `UserError` if a run, a `Trainer.Config`, cannot skip steps or return to a
            checkpoint."""
            if self.threshold is not None and run.optimizer.early_step_in_backward:
                raise UserError(
                    "--optimizer.early_step_in_backward cannot be combined with "
                    f"--spikes.threshold {self.threshold}, since weights are already updated when "
                    "the loss is known"
                )
            if self.action != "stop" and not run.checkpoint.saves:
                raise UserError(
                    f"--spikes.action {self.action} returns to a checkpoint, and needs "
                    "--checkpoint.enable"
                )
            kept, interval = run.checkpoint.keep_latest_k, run.checkpoint.interval
            if self.action != "stop" and kept and (kept - 1) * interval < self.max_in_a_row:
                raise UserError(
                    f"--spikes.action {self.action}: after {self.max_in_a_row} skipped steps "
                    f"(--spikes.max_in_a_row), the {kept} checkpoints that are kept may all be "
                    f"newer than the step to return to; increase --checkpoint.keep_latest_k {kept} "
                    f"or --checkpoint.interval {interval}"
                )

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self._recent = deque[tuple[float, float]](maxlen=config.window)  # loss and gradient norm
        self.in_a_row = 0
        """Steps skipped since the last step taken, or the last return to a checkpoint."""
        self.n_skipped = 0
        self.returned_to: int | None = None
        """Step of the checkpoint to which the run last returned."""

    @property
    def is_return_due(self) -> bool:
        return self.in_a_row >= self.config.max_in_a_row

    def spike(self, loss: float, grad_norm: float) -> str:
        """Return a description if a step with these finite numbers is a spike, otherwise ""."""
        if self.config.threshold is None or len(self._recent) < self.config.window:
            return ""
        numbers = {"loss": loss, "gradient norm": grad_norm}
        for (name, value), values in zip(
            numbers.items(), zip(*self._recent, strict=True), strict=True
        ):
            mean, deviation = statistics.fmean(values), statistics.stdev(values)
            if deviation > 0 and value - mean > self.config.threshold * deviation:
                return (
                    f"the {name} is a spike (the last {len(values)} steps: {mean:.4g} ± "
                    f"{deviation:.2g})"
                )
        return ""

    def record(self, loss: float, grad_norm: float) -> None:
        """Add the numbers of a step that was taken."""
        self.in_a_row = 0
        self._recent.append((loss, grad_norm))

    def count_skipped(self) -> None:
        self.in_a_row += 1
        self.n_skipped += 1

    def state_dict(self) -> dict[str, object]:
        return {
            "recent": [*map(list, self._recent)],
            **{name: getattr(self, name) for name in _COUNTS},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state, also one with another window."""
        self._recent = deque(
            [(loss, norm) for loss, norm in state_dict["recent"]], maxlen=self.config.window
        )
        for name in _COUNTS:
            setattr(self, name, state_dict[name])

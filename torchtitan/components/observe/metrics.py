"""`MetricsProcessor`: measures a training run and reports to the console, a file and experiment
trackers."""

import dataclasses
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from torchtitan.components.observe.metric_sinks import JsonLines, Sink, TensorBoard
from torchtitan.components.observe.run_files import METRICS
from torchtitan.components.observe.tracking_sinks import MLflow, Tracker, Trackio, WandB
from torchtitan.config.code import RunFolder
from torchtitan.config.configurable import Configurable, builds
from torchtitan.config.ranges import check_ranges
from torchtitan.tools import durable
from torchtitan.tools.device import (
    PeakFlops,
    device_description,
    memory_gib,
    peak_flops,
    synchronize,
)
from torchtitan.tools.errors import os_errors_as
from torchtitan.tools.logging import logger

SHOWN_PARTS = {"rewards/margins": "margin", "rewards/accuracies": "accuracy"}
"""Numbers called NAME/PART that the console and the progress bar show, and their titles there: they
judge runs of preference optimization and reward models."""

_RESET = "\033[0m"
_DIM = "\033[2m"
_GREEN = "\033[32m"
_BLUE = "\033[34m"
_MAGENTA = "\033[35m"
_CYAN = "\033[36m"


@dataclass(slots=True)
class _Interval:
    """Measurements since the logged step `step`, with times in seconds."""

    step: int
    start: float
    excluded: float = 0.0
    data: float = 0.0
    n_tokens: int = 0
    n_flops: float = 0.0  # in addition to the operations of tokens
    n_images: int = 0
    n_image_tokens: int = 0


class MetricsProcessor(Configurable):
    """Measures the steps of a run and reports them; see `docs/metrics.md`.

        metrics.start(step)                     # after loading a checkpoint, if any
        for step in range(step + 1, total_steps + 1):
            with metrics.timing_data():
                batch = next(batches)
            metrics.count_tokens(...)           # of the global batch
            ...
            metrics.log_step(step, loss=..., grad_norm=..., lr=..., n_tokens_seen=...)
            if ...:                             # validation or a checkpoint is due
                with metrics.exclude():
                    ...
        metrics.flush()
        metrics.close()

    Every rank makes these calls; rank 0 writes to the sinks, and ranks with an active logger print
    a line.

    Args:
        dump_folder: the run's folder; `metrics.jsonl` is written there.
        device: this rank's device.
        compute_dtype: dtype of matrix products; MFU is relative to its peak.
        flops_per_token: floating-point operations of a training step (forward and backward) per
            token.
        total_steps: the last step, for the ETA.
        world_size: number of ranks.
        rank: this rank.
        run_config: the run's configuration, for trackers of experiments.
        unit: what `count_tokens` counts, in the names of metrics: `tokens`, or the samples of a
            model without tokens.
        clock: monotonic clock in seconds.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Contents, frequency and destination of reports."""

        log_freq: int = 10
        """Steps between logged steps; the first and last steps are always logged."""

        dataset_losses: bool = False
        """Also report the training loss of each dataset in a step, as loss/DATASET."""

        enable_tensorboard: bool = False
        """Also write the metrics for TensorBoard (metrics.jsonl is always written)."""

        save_tb_folder: RunFolder = "tb"
        """Folder of the TensorBoard files inside the dump folder."""

        enable_wandb: bool = False
        """Also send the metrics to Weights & Biases, configured by WANDB_PROJECT and its other
        environment variables."""

        enable_mlflow: bool = False
        """Also send the metrics to MLflow, configured by MLFLOW_TRACKING_URI,
        MLFLOW_EXPERIMENT_NAME and its other environment variables."""

        enable_trackio: bool = False
        """Also send the metrics to Trackio, configured by TRACKIO_PROJECT, TRACKIO_DIR and its
        other environment variables."""

        enable_live_view: bool = True
        """Show a progress bar below the log if standard error is a terminal."""

        @builds(lambda: MetricsProcessor)
        def build(self) -> object:
            """Build the metrics of a run."""

        def validate(self) -> None:
            check_ranges("metrics", self)
            for tracker in self.trackers():
                tracker.check_installed()

        def check_logins(self) -> None:
            """Raise `UserError` if a tracker does not know the user. It asks the tracker, which
            starts a process of its own, on this host."""
            for tracker in self.trackers():
                tracker.check_login()

        def trackers(self) -> list[type[Tracker]]:
            """Return the chosen trackers of experiments."""
            chosen: dict[type[Tracker], bool] = {
                WandB: self.enable_wandb,
                MLflow: self.enable_mlflow,
                Trackio: self.enable_trackio,
            }
            return [tracker for tracker, is_on in chosen.items() if is_on]

    config: Config

    def __init__(
        self,
        config: Config,
        *,
        dump_folder: str,
        device: torch.device,
        compute_dtype: torch.dtype,
        flops_per_token: float,
        total_steps: int,
        world_size: int = 1,
        rank: int = 0,
        run_config: Mapping[str, object] | None = None,
        unit: str = "tokens",
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(config)
        self.dump_folder = Path(dump_folder)
        self.run_config = run_config or {}
        self.unit = unit
        self.device = device
        self.compute_dtype = compute_dtype
        self.flops_per_token = flops_per_token
        self.total_steps = total_steps
        self.world_size = world_size
        self.rank = rank
        self._clock = clock
        self._interval = _Interval(0, clock())
        self._added: dict[str, float] = {}
        # reports the last step, if it was not due
        self._unreported: Callable[[], None] | None = None
        # step and time of the first log line, after warm-up
        self._first_line: tuple[int, float] | None = None
        self._has_started = False
        self._peak: PeakFlops | None = None  # set by the first report
        self._sinks: list[Sink] = []
        self._failed_sinks: list[Sink] = []
        self._reports = rank == 0 or logger.isEnabledFor(logging.INFO)

    def start(self, step: int) -> None:
        """Open the sinks and start the clock; `step` is the last completed step. The first report
        measures and logs the peak FLOP/s for MFU, so that the first step does not wait for it.

        A new run (`step` 0) moves an earlier run's metrics aside; a resumed run drops metrics after
        `step`, since it repeats those steps. Raise `UserError` if the folder is not writable, or
        a tracker does not start.
        """
        if self.rank == 0:
            with os_errors_as(
                f"metrics cannot be written to {self.dump_folder}", "; set --dump_folder to another"
            ):
                durable.make_folder(self.dump_folder)
                self._sinks = self.make_sinks(step)
        self._has_started = True
        self._interval = _Interval(step, self._clock())

    def _peak_of_device(self) -> float:
        """Return the peak FLOP/s for MFU, which the first call measures and logs."""
        if self._peak is None:
            self._peak = peak_flops(self.device, self.compute_dtype)
            logger.info(
                f"{device_description(self.device)}: MFU is relative to "
                f"{self._peak.value / 1e12:,.2f} TFLOP/s ({self._peak.source})"
            )
        return self._peak.value

    def make_sinks(self, step: int) -> list[Sink]:
        """Return rank 0's sinks, opened for a run that starts after `step`. Override it to add a
        sink."""
        # first, so that an error leaves the previous run's files unchanged
        sinks: list[Sink] = [
            tracker(self.dump_folder, step, self.run_config) for tracker in self.config.trackers()
        ]
        sinks.append(JsonLines(self.dump_folder / METRICS, step))
        if self.config.enable_tensorboard:
            sinks.append(TensorBoard(self.dump_folder / self.config.save_tb_folder, step))
        return sinks

    @contextmanager
    def timing_data(self) -> Iterator[None]:
        """Measure the time that a step waits for its batch."""
        start = self._clock()
        try:
            yield
        finally:
            self._interval.data += self._clock() - start

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Exclude time and tokens of other work (validation, saving a checkpoint) from the metrics.
        Enter it only when needed, since it synchronizes with the device."""
        synchronize(self.device)  # queued training work counts as training
        before = dataclasses.replace(self._interval)
        start = self._clock()
        try:
            yield
        finally:
            before.excluded += self._clock() - start
            self._interval = before

    def count_tokens(self, n_tokens: int) -> None:
        """Add to the tokens of this step, over all ranks and including padding."""
        self._interval.n_tokens += n_tokens

    def count_flops(self, n_flops: float) -> None:
        """Add operations to this step, over all ranks, in addition to the operations for its
        tokens."""
        self._interval.n_flops += n_flops

    def count_images(self, n_images: int, n_tokens: int) -> None:
        """Add to the images of this step, over all ranks, and to their tokens."""
        self._interval.n_images += n_images
        self._interval.n_image_tokens += n_tokens

    def should_log(self, step: int) -> bool:
        """Return whether `log_step` reports this step, independently of interruptions."""
        return step == 1 or step % self.config.log_freq == 0 or step == self.total_steps

    def add(self, numbers: Mapping[str, float]) -> None:
        """Report further metrics with the next step; of numbers called NAME/PART, the console has
        `SHOWN_PARTS`."""
        self._added |= numbers

    def log_step(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        n_tokens_seen: int,
        **extra: float,
    ) -> None:
        """Report a completed step if `should_log`. Call this after reading the loss from the
        device. Other steps are kept until the next call, since the last step is always reported
        (`flush`).

        Args:
            step: counted from 1.
            loss: mean over the valid tokens of the global batch.
            grad_norm: norm of the gradient before clipping.
            n_tokens_seen: tokens since step 1 on all ranks, including padding.
            extra: additional metrics by name.
        """
        extra, self._added = extra | self._added, {}
        if not self._reports:
            return
        values = {"loss": loss, "grad_norm": grad_norm, "lr": lr}
        values[f"n_{self.unit}_seen"] = n_tokens_seen
        interval = dataclasses.replace(self._interval)
        self._unreported = functools.partial(
            self._report, step, self._clock(), interval, values, extra
        )
        if self.should_log(step):
            self.flush()

    def flush(self) -> None:
        """Report the last step if it has not been reported. Call this when training ends."""
        report, self._unreported = self._unreported, None
        if report is not None:
            report()

    def _report(
        self,
        step: int,
        end: float,
        interval: _Interval,
        values: dict[str, float],
        extra: dict[str, float],
    ) -> None:
        start = self._clock()
        values = values | self._measure(step, end, interval)
        measuring = self._clock() - start  # seconds, when the first report measures the peak
        self._for_each_sink(lambda sink: sink.write(step, values | extra))
        eta_seconds = None
        # from the average pace, including validation and checkpoints
        if self._first_line is not None:
            first_step, first_end = self._first_line
            eta_seconds = (end - first_end) / (step - first_step) * (self.total_steps - step)
        line = self.console_line(step, values, extra, eta_seconds)
        logger.info("%s", line, extra={"is_colored": True})
        self._interval = _Interval(step, end)
        self._interval.excluded += measuring
        self._first_line = self._first_line or (step, end + measuring)

    def log_validation(self, step: int, validation_loss: float, **extra: float) -> None:
        """Report a validation after `step` on a separate line, without affecting the training
        timers."""
        if not self._reports:
            return
        self._for_each_sink(
            lambda sink: sink.write(step, {"validation_loss": validation_loss, **extra})
        )
        logger.info(
            f"{self._step_label(step)}  validation loss {validation_loss:.4f}{_format_extra(extra)}"
        )

    def log_evaluation(
        self, step: int, name: str, numbers: Mapping[str, float]
    ) -> dict[str, float]:
        """Report an evaluation task after `step` on a separate line, as
        `evaluation/NAME/NUMBER`, and return the numbers by these names."""
        named = {f"evaluation/{name}/{key}": value for key, value in numbers.items()}
        if self._reports:
            self._for_each_sink(lambda sink: sink.write(step, named))
            logger.info(f"{self._step_label(step)}  evaluation{_format_extra(named)}")
        return named

    def sync(self) -> None:
        """Flush all reports to disk. Call this before saving a checkpoint."""
        self._for_each_sink(lambda sink: sink.sync())

    def close(self) -> None:
        """Report the last step if pending (after an error in the loop), and close the sinks."""
        self.flush()
        self._for_each_sink(lambda sink: sink.close())
        self._sinks = []

    def console_line(
        self,
        step: int,
        values: Mapping[str, float],
        extra: Mapping[str, float],
        eta_seconds: float | None,
    ) -> str:
        """Return the aligned log line of a step, in color if standard error is a terminal."""
        extra = shown_numbers(extra)
        eta = "-" if eta_seconds is None else str(timedelta(seconds=round(eta_seconds)))
        parts = [
            (_CYAN, self._step_label(step)),
            (_GREEN, f"loss {values['loss']:7.4f}"),
            ("", f"grad norm {values['grad_norm']:7.4f}"),
            ("", f"lr {values['lr']:.2e}"),
            (_BLUE, f"{values[f'{self.unit}_per_second']:7,.0f} {self.unit}/s"),
            (_MAGENTA, f"{values['tflops']:6.2f} TFLOP/s {values['mfu']:5.1f}% MFU"),
            ("", f"{values['memory_gib']:5.2f} GiB"),
            (_DIM, f"ETA {eta}{_format_extra(extra)}"),
        ]
        if not sys.stderr.isatty():
            return "  ".join(text for _, text in parts)
        return "  ".join(f"{color}{text}{_RESET}" if color else text for color, text in parts)

    def _measure(self, step: int, end: float, interval: _Interval) -> dict[str, float]:
        """Return the training metrics of the interval that ends with `step`."""
        if not self._has_started:
            raise RuntimeError("MetricsProcessor.start(step) must be called before log_step")
        seconds = end - interval.start - interval.excluded
        tokens_per_second = interval.n_tokens / seconds
        flops = self.flops_per_token * interval.n_tokens + interval.n_flops
        flops_per_device = flops / seconds / self.world_size
        images = {
            "images_per_second": interval.n_images / seconds,
            "image_token_fraction": interval.n_image_tokens / max(interval.n_tokens, 1),
        }
        return {
            f"{self.unit}_per_second": tokens_per_second,
            "tflops": flops_per_device / 1e12,
            "mfu": 100 * flops_per_device / self._peak_of_device(),
            "memory_gib": memory_gib(self.device),
            "data_loading_fraction": interval.data / seconds,
            "step_time": seconds / (step - interval.step),
            **(images if interval.n_images else {}),
        }

    def _step_label(self, step: int) -> str:
        return f"step {step:{len(str(self.total_steps))}}/{self.total_steps}"

    def _for_each_sink(self, action: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            try:
                action(sink)
            except OSError as error:
                if sink not in self._failed_sinks:
                    self._failed_sinks.append(sink)
                    logger.warning(
                        f"{type(sink).__name__} cannot write metrics: {error}; training continues"
                    )


def shown_numbers(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of a step that the console shows, by their titles there."""
    shown = {SHOWN_PARTS.get(name, name): value for name, value in numbers.items()}
    return {title: value for title, value in shown.items() if "/" not in title}


def _format_extra(extra: Mapping[str, float]) -> str:
    return "".join(f"  {name} {value:.4g}" for name, value in extra.items())

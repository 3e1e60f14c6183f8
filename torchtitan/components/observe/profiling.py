"""`Profiler`: traces of single steps and snapshots of GPU memory."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from torchtitan.config.code import RunFolder
from torchtitan.config.configurable import Configurable, builds
from torchtitan.config.ranges import check_ranges
from torchtitan.tools import durable
from torchtitan.tools.device import device_type
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_SNAPSHOT_EVENTS = 100_000  # number of allocations and frees in a memory snapshot


class Profiler(Configurable):
    """Records traces and memory snapshots of a training loop; does nothing unless enabled.

        with profiler:
            for step in range(1, total_steps + 1):
                ...
                profiler.step(step)

    Traces go to `{dump_folder}/{save_traces_folder}/step-N/rank{r}.json` (Chrome trace format, for
    https://ui.perfetto.dev), memory snapshots to
    `{dump_folder}/{save_memory_snapshot_folder}/step-N/rank{r}.pickle` (for
    https://pytorch.org/memory_viz); N is the last step recorded. Every rank writes its own. If a
    file cannot be written, a warning is logged and training continues.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Contents and frequency of recordings."""

        enable_profiling: bool = False
        """Record traces of steps with torch.profiler: operators, kernels, shapes, memory."""

        save_traces_folder: RunFolder = "profile_traces"
        """Folder of the traces inside the dump folder."""

        profile_freq: int = 10
        """Steps between traces or memory snapshots."""

        profiler_warmup: int = 1
        """Steps before each trace in which the profiler runs without recording, to exclude its
        startup cost."""

        profiler_active: int = 1
        """Steps in each trace."""

        enable_memory_snapshot: bool = False
        """Save the history of the CUDA allocator every profile_freq steps, and when memory runs
        out."""

        save_memory_snapshot_folder: RunFolder = "memory_snapshot"
        """Folder of the memory snapshots inside the dump folder."""

        @builds(lambda: Profiler)
        def build(self) -> object:
            """Build the profiler of a rank."""

        @property
        def is_on(self) -> bool:
            """True if there is anything to record."""
            return self.enable_profiling or self.enable_memory_snapshot

        def validate(self) -> None:
            check_ranges("profiling", self)
            if self.profiler_warmup + self.profiler_active > self.profile_freq:
                raise UserError(
                    "--profiling.profile_freq must be at least profiler_warmup + profiler_active "
                    f"= {self.profiler_warmup} + {self.profiler_active}, not {self.profile_freq}"
                )
            if self.enable_memory_snapshot and device_type() != "cuda":
                raise UserError(
                    "--profiling.enable_memory_snapshot requires CUDA, but the device is "
                    f"{device_type()}; use --profiling.enable_profiling, whose traces record the "
                    "memory of each operator"
                )

    config: Config

    def __init__(self, config: Config, *, dump_folder: str, device: torch.device, rank: int = 0):
        super().__init__(config)
        self.dump_folder = Path(dump_folder)
        self.device = device
        self.rank = rank
        self._step = 0
        self._n_steps = 0
        self._trace: torch.profiler.profile | None = None

    def __enter__(self) -> "Profiler":
        self._n_steps = 0
        if self.config.enable_profiling:
            self._trace = self._start_trace()
        if self.config.enable_memory_snapshot:
            _record_memory_history(max_entries=_SNAPSHOT_EVENTS)
        return self

    def step(self, step: int) -> None:
        """Record the end of `step`. Every `profile_freq` steps, write a trace and a memory
        snapshot."""
        self._step = step
        self._n_steps += 1
        if self._trace is not None:
            self._trace.step()
        if self._n_steps % self.config.profile_freq != 0:
            return
        if self._trace is not None:
            export = partial(_export, self._trace)
            self._write("trace", self.config.save_traces_folder, f"step-{step}", "json", export)
            self._trace.stop()
            self._trace = self._start_trace()
        if self.config.enable_memory_snapshot:
            self._save_snapshot(f"step-{step}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.config.enable_memory_snapshot:
            if isinstance(error, torch.OutOfMemoryError):
                self._save_snapshot(f"step-{self._step + 1}-out-of-memory")
            _record_memory_history(enabled=None)
        if self._trace is not None:
            self._trace.stop()
            self._trace = None
            if error is None and self._n_steps < self.config.profile_freq:
                logger.warning(
                    "no trace was written, since --profiling.profile_freq is "
                    f"{self.config.profile_freq} and the run had only {self._n_steps} steps; "
                    "reduce it"
                )

    def _start_trace(self) -> torch.profiler.profile:
        """Start a cycle of wait, warm-up and recording. Each cycle has a new profiler, since reuse
        logs warnings."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        warmup, active = self.config.profiler_warmup, self.config.profiler_active
        wait = self.config.profile_freq - warmup - active
        trace = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            record_shapes=True,
            profile_memory=True,
        )
        trace.start()
        return trace

    def _save_snapshot(self, name: str) -> None:
        from torchtitan.tools.torch_private import dump_memory_snapshot as dump

        folder = self.config.save_memory_snapshot_folder
        self._write("memory snapshot", folder, name, "pickle", lambda path: dump(str(path)))

    def _write(
        self, kind: str, folder: str, name: str, suffix: str, write: Callable[[Path], None]
    ) -> None:
        """Write a file with `write`; log its path or the error."""
        path = self.dump_folder / folder / name / f"rank{self.rank}.{suffix}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with durable.in_place_of(path) as unfinished:
                write(unfinished)
        except OSError as error:
            logger.warning(
                f"could not write the {kind} {path}: {error.strerror or error}; training continues"
            )
        else:
            logger.info(f"wrote the {kind} {path}")


def _record_memory_history(**options: object) -> None:
    from torchtitan.tools.torch_private import record_memory_history

    record_memory_history(**options)


def _export(trace: torch.profiler.profile, path: Path) -> None:
    """Write a trace. Raise `OSError` if it is incomplete, which PyTorch (2.13) does not report."""
    partial_path = path.with_name(f"{path.name}.tmp")  # PyTorch's temporary file
    path.touch()  # raises an error with the reason if the file cannot be written
    path.unlink()
    trace.export_chrome_trace(str(path))
    if partial_path.exists() or not path.exists():
        partial_path.unlink(missing_ok=True)
        raise OSError("the profiler wrote an incomplete file (is the disk full?)")

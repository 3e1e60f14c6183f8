"""Atomic saves of checkpoints: in the foreground, in a background thread, or in a separate process.

A background save blocks training only while `stage` copies the states to CPU memory.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from torchtitan.components.checkpoint import catalog
from torchtitan.components.checkpoint.config import AsyncMode
from torchtitan.components.checkpoint.filesystem import Folder, errors_logged
from torchtitan.components.checkpoint.manifest import KIND_DESCRIPTIONS, Kind, Marker
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.state import Entries
from torchtitan.components.checkpoint.writer_process import SharedMemory, WriterProcess
from torchtitan.distributed.initialize import local_part
from torchtitan.distributed.process_group import is_lost_rank
from torchtitan.tools.errors import RunFailure
from torchtitan.tools.logging import logger
from torchtitan.tools.sharded import is_dtensor
from torchtitan.tools.torch_private import dtensor_like

Export = Callable[[Path, Path, Ranks], None]
"""Function called on every rank with the folder of a model-only checkpoint, an empty folder for the
exported files, and the ranks. An error on one rank is raised on all ranks."""


class CheckpointSaveError(RunFailure):
    """Raised if the last save of a run fails; the message names the checkpoint and the cause."""


class Assets(Protocol):
    """Additional files that make a checkpoint usable without the run that wrote it."""

    def write(self, folder: Path, /) -> None:
        """Write the files into a checkpoint folder."""


@dataclasses.dataclass
class Saver:
    """Writes and commits the checkpoints of a `CheckpointManager`, one at a time. All ranks make
    the same calls. A failed save sets `failure` until the next save begins; only `TypeError`,
    `AssertionError` and the errors of collectives that lost a rank are raised."""

    folder: Folder

    ranks: Ranks
    """The saving ranks. Their group must not be used for anything else during a background save."""

    async_mode: AsyncMode

    assets: Assets | None
    """Files that rank 0 writes into each checkpoint."""

    export: Export | None
    """Writes a checkpoint in Hugging Face format (kind "huggingface")."""

    prune: Callable[[int], None]
    """Called on rank 0 with the step that was saved."""

    step: int = 0
    """Step of the newest complete checkpoint of the run."""

    kind: Kind = "full"
    """Contents of that checkpoint."""

    best_loss: float = math.inf
    """Lowest number of a complete checkpoint that `keep_best` minimizes."""

    failure: str = ""
    """Error of the most recent save, if it failed."""

    def __post_init__(self) -> None:
        self._executor = _background_thread()
        self._in_flight: Future[None] | None = None
        self._process: WriterProcess | None = None
        if self.async_mode != "disabled":
            # Imported now, since it would stop training in the first save.
            from torch.distributed.checkpoint import state_dict  # noqa: F401

            from torchtitan.components.checkpoint import dcp  # noqa: F401

    def reserve(self, entries: Mapping[str, Entries]) -> SharedMemory:
        """Return memory for a copy of `entries` that the writer process shares. The first time
        takes longer than a copy."""
        if self._process is None:
            self._process = WriterProcess()
        self._process.memory.reserve(entries)
        return self._process.memory

    def save(
        self,
        marker: Marker,
        entries: Mapping[str, Entries],
        start_time: float,
        *,
        in_background: bool,
    ) -> None:
        """Write a checkpoint of `entries`. Return as soon as they are copied if `in_background`,
        otherwise after they are written. `start_time` is the `time.perf_counter()` at which
        training was blocked."""
        assert self._in_flight is None, "a save is in progress"
        self.failure = ""
        if not in_background:
            self._write(marker, entries, start_time)
            return
        staged: dict[str, Entries] = {}
        with self._failure_recorded(marker.step):
            # All ranks stage together, so that no rank waits for one that ran out of memory.
            self.ranks.all_ranks_or_raise(lambda: staged.update(self._stage(entries)))
            self._in_flight = self._executor.submit(
                self._write, marker, staged, start_time, time.perf_counter()
            )

    def write_to(self, folder: Folder, marker: Marker, entries: Mapping[str, Entries]) -> str:
        """Write a checkpoint of `entries` into another folder, and remove nothing there. Return the
        error, if any."""
        other = dataclasses.replace(
            self, folder=folder, async_mode="disabled", prune=lambda step: None
        )
        other.save(marker, entries, time.perf_counter(), in_background=False)
        return other.failure

    def wait(self) -> None:
        """Wait for the background save, if any."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight:
            in_flight.result()

    def close(self) -> None:
        """Wait for the background save, then release the thread, the process and the memory."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            if self._process:
                self._process.close()
                self._process = None

    def raise_failure(self) -> None:
        """Raise `CheckpointSaveError` if the most recent save failed, and clear the failure."""
        failure, self.failure = self.failure, ""
        if failure:
            raise CheckpointSaveError(failure)

    def _stage(self, entries: Mapping[str, Entries]) -> dict[str, Entries]:
        if self.async_mode == "async":
            return stage(entries, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        return stage(entries, self.reserve(entries).empty_like)

    def _write(
        self,
        marker: Marker,
        entries: Mapping[str, Entries],
        start_time: float,
        unblocked: float | None = None,
    ) -> None:
        """Write, commit and prune. `unblocked` is the time at which training resumed, None for a
        foreground save."""
        with self._failure_recorded(marker.step):
            path = self._write_complete(marker, entries, self._process if unblocked else None)
            self.step, self.kind = marker.step, marker.kind
            loss = marker.criterion.loss_of(marker)
            if loss is not None:
                self.best_loss = min(self.best_loss, loss)
            blocked = (unblocked or time.perf_counter()) - start_time
            contents = (
                ""
                if marker.kind == "full"
                else f" ({KIND_DESCRIPTIONS[marker.kind]}; runs cannot resume from it)"
            )
            logger.info("saved %s%s; training was blocked for %.3f s", path, contents, blocked)
        if not self.failure and self.ranks.rank == 0:
            self.prune(marker.step)

    def _write_complete(
        self, marker: Marker, entries: Mapping[str, Entries], process: WriterProcess | None
    ) -> Folder:
        from torchtitan.components.checkpoint import dcp

        partial = self.ranks.broadcast_from_rank0(
            lambda: catalog.start_partial(self.folder, marker.step)
        )
        if marker.kind == "huggingface":
            return self._write_exported(partial, marker, entries)
        dcp.save(partial, entries, self.ranks.group, process.write if process else None)
        return self._commit(partial, marker)

    def _write_exported(
        self, partial: Folder, marker: Marker, entries: Mapping[str, Entries]
    ) -> Folder:
        """Save the model in DCP format next to `partial`, then fill `partial` with `export`."""
        from torchtitan.components.checkpoint import dcp

        assert self.export, "checked by the manager"
        dcp_folder = self.ranks.broadcast_from_rank0(lambda: catalog.start_dcp(partial))
        dcp.save(dcp_folder, entries, self.ranks.group)
        try:
            self.export(Path(str(dcp_folder)), Path(str(partial)), self.ranks)
            path = self._commit(partial, marker)
        except Exception as error:  # whatever the error, keep the weights
            if marker.step == self.step and self.kind == "full":
                raise  # the full checkpoint of this step still exists
            self.ranks.broadcast_from_rank0(
                lambda: catalog.remove_checkpoint(partial) if partial.exists() else None
            )
            self._commit(dcp_folder, dataclasses.replace(marker, kind="model_only"))
            raise _ExportError(
                f"{type(error).__name__}: {error}; the weights were saved there in DCP format "
                "instead; use `torchtitan convert` to export them"
            ) from error
        if self.ranks.rank == 0:
            with errors_logged(f"could not remove {dcp_folder}"):
                catalog.remove_checkpoint(dcp_folder)
        return path

    def _commit(self, partial: Folder, marker: Marker) -> Folder:
        def write_assets() -> None:
            if self.assets:
                with partial.fill() as folder:
                    self.assets.write(folder)

        self.ranks.broadcast_from_rank0(write_assets)
        return catalog.commit(partial, marker, self.ranks, name=f"step-{marker.step}")

    @contextlib.contextmanager
    def _failure_recorded(self, step: int) -> Iterator[None]:
        """Store an error inside the block as `failure`, and remove the files of the failed save."""
        try:
            yield
        except (TypeError, AssertionError):
            raise
        except Exception as error:  # fsspec back ends raise their own exception classes
            if self.ranks.group and is_lost_rank(error):
                raise  # the group of the ranks cannot be used again
            reason = (
                str(error)
                if isinstance(error, _ExportError)
                else f"{type(error).__name__}: {error}"
            )
            self.failure = f"{self.folder / f'step-{step}'} could not be saved: {reason}"
            logger.warning("%s; older checkpoints are unchanged", self.failure)
            if self.ranks.rank == 0:
                # If this fails, the next save of the step or the next start of the run removes the
                # files.
                with contextlib.suppress(OSError):
                    catalog.discard_incomplete(self.folder, step)


class _ExportError(Exception):
    """Raised if the model was saved, but not in the requested format; the message gives the
    cause."""


def _background_thread() -> ThreadPoolExecutor:
    """Return a one-thread executor on the caller's CUDA device. Otherwise, DCP would create a
    context on device 0."""
    initializer: Callable[[], None] | None = None
    if torch.cuda.is_initialized():
        initializer = functools.partial(torch.cuda.set_device, torch.cuda.current_device())
    return ThreadPoolExecutor(
        max_workers=1, thread_name_prefix="checkpoint", initializer=initializer
    )


def stage(
    states: Mapping[str, Entries], empty_like: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, dict[str, torch.Tensor | str]]:
    """Return a copy of `states` with this rank's tensor shards in CPU memory. The copy is complete
    on return. `empty_like` returns an uninitialized, contiguous CPU tensor with the shape and dtype
    of its argument."""

    def copy(value: torch.Tensor | str) -> torch.Tensor | str:
        if isinstance(value, str):
            return value
        local = local_part(value)
        staged = empty_like(local).copy_(local, non_blocking=True)
        # `DTensor.from_local` would move the copy to the mesh's device.
        return dtensor_like(staged, value) if is_dtensor(value) else staged

    with torch.no_grad():
        staged = {
            name: {key: copy(value) for key, value in entries.items()}
            for name, entries in states.items()
        }
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return staged

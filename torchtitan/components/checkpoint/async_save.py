"""Atomic checkpoint saves: in the foreground, in a background thread, or in a separate process.

A background save blocks training only while `stage` copies the states to CPU memory. `WriterProcess` writes a rank's
files from memory shared with the rank. The rank itself plans, computes digests and commits, so if the process dies,
the save fails without blocking the other ranks.

`torch.distributed.checkpoint.async_save` with `AsyncCheckpointerType.PROCESS` (torch 2.13) is not used: it reruns
scripts without a `__main__` guard, needs a process group even for one process, fails every save after its process is
killed, and keeps writing into the folder after the rank is killed; if one writer dies, the others wait half an hour.
`DefaultStager` copies the whole storage of a slice, and shares memory through /dev/shm (64 MB in a container by
default).
"""

import contextlib
import dataclasses
import functools
import io
import mmap
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpoint import catalog
from torchtitan.components.checkpoint.config import AsyncMode
from torchtitan.components.checkpoint.filesystem import Folder, folder_at
from torchtitan.components.checkpoint.manifest import Kind, Marker, describe_kind
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.state import Entries
from torchtitan.tools.errors import RunFailure
from torchtitan.tools.logging import logger
from torchtitan.tools.process import signal_when_orphaned
from torchtitan.tools.torch_private import dtensor_like

if TYPE_CHECKING:
    # Deferred at run time: torch.distributed.checkpoint takes a second to import.
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult

    _Data = dict[MetadataIndex, "SharedBufferRef | bytes"]

Export = Callable[[Path, Path, Ranks], None]
"""Function called on every rank with the folder of a model-only checkpoint, an empty folder for the exported files, and
the ranks. An error on one rank is raised on all ranks."""

_PROGRAMMING_ERRORS = (TypeError, AssertionError)
_ALIGNMENT = 64
_POLL_SECONDS = 1.0


class CheckpointSaveError(RunFailure):
    """Raised if the last save of a run fails; the message names the checkpoint and the cause."""


class Assets(Protocol):
    """Additional files that make a checkpoint usable without the run that wrote it."""

    def write(self, folder: Path, /) -> None:
        """Write the files into a checkpoint folder."""


@dataclasses.dataclass
class Saver:
    """Writes and commits the checkpoints of a `CheckpointManager`, one at a time. All ranks make the same calls. A
    failed save sets `failure` until the next save begins; only `TypeError` and `AssertionError` are raised."""

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

    def reserve(self, entries: Mapping[str, Entries]) -> "SharedMemory":
        """Return memory for a copy of `entries` that the writer process shares. The first time takes longer than a
        copy."""
        if self._process is None:
            self._process = WriterProcess()
        self._process.memory.reserve(entries)
        return self._process.memory

    def save(self, marker: Marker, entries: Mapping[str, Entries], start_time: float, *, in_background: bool) -> None:
        """Write a checkpoint of `entries`. Return as soon as they are copied if `in_background`, otherwise after they
        are written. `start_time` is the `time.perf_counter()` at which training was blocked."""
        assert self._in_flight is None, "a save is in progress"
        self.failure = ""
        if not in_background:
            self._write(marker, entries, start_time)
            return
        staged: dict[str, Entries] = {}
        try:
            # All ranks stage together, so that no rank waits for one that ran out of memory.
            self.ranks.all_ranks_or_raise(lambda: staged.update(self._stage(entries)))
        except _PROGRAMMING_ERRORS:
            raise
        except Exception as error:
            self._fail(marker.step, error)
            return
        self._in_flight = self._executor.submit(self._write, marker, staged, start_time, time.perf_counter())

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
        self, marker: Marker, entries: Mapping[str, Entries], start_time: float, unblocked: float | None = None
    ) -> None:
        """Write, commit and prune. `unblocked` is the time at which training resumed, None for a foreground save."""
        try:
            path = self._write_complete(marker, entries, self._process if unblocked else None)
        except _PROGRAMMING_ERRORS:
            raise
        except Exception as error:  # fsspec back ends raise their own exception classes
            self._fail(marker.step, error)
            return
        self.step, self.kind, self.failure = marker.step, marker.kind, ""
        blocked = (unblocked or time.perf_counter()) - start_time
        contents = "" if marker.kind == "full" else f" ({describe_kind(marker.kind)}; runs cannot resume from it)"
        logger.info("saved %s%s; training was blocked for %.3f s", path, contents, blocked)
        if self.ranks.rank == 0:
            self.prune(marker.step)

    def _write_complete(
        self, marker: Marker, entries: Mapping[str, Entries], process: "WriterProcess | None"
    ) -> Folder:
        from torchtitan.components.checkpoint import dcp

        partial = self.ranks.broadcast_from_rank0(lambda: catalog.start_partial(self.folder, marker.step))
        if marker.kind == "huggingface":
            return self._write_exported(partial, marker, entries)
        dcp.save(partial, entries, self.ranks.group, process.write if process else None)
        return self._commit(partial, marker)

    def _write_exported(self, partial: Folder, marker: Marker, entries: Mapping[str, Entries]) -> Folder:
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
            self.ranks.broadcast_from_rank0(lambda: catalog.remove_checkpoint(partial) if partial.exists() else None)
            self._commit(dcp_folder, dataclasses.replace(marker, kind="model_only"))
            raise _ExportError(
                f"{type(error).__name__}: {error}; the weights were saved there in DCP format instead; use "
                "`torchtitan convert` to export them"
            ) from error
        if self.ranks.rank == 0:
            try:
                catalog.remove_checkpoint(dcp_folder)
            except OSError as error:
                logger.warning("could not remove %s: %s", dcp_folder, error)
        return path

    def _commit(self, partial: Folder, marker: Marker) -> Folder:
        def write_assets() -> None:
            if self.assets:
                with partial.fill() as folder:
                    self.assets.write(folder)

        self.ranks.broadcast_from_rank0(write_assets)
        return catalog.commit(partial, marker, self.ranks, name=f"step-{marker.step}")

    def _fail(self, step: int, cause: Exception) -> None:
        path = self.folder / f"step-{step}"
        reason = str(cause) if isinstance(cause, _ExportError) else f"{type(cause).__name__}: {cause}"
        self.failure = f"{path} could not be saved: {reason}"
        logger.warning("%s; older checkpoints are unchanged", self.failure)
        if self.ranks.rank == 0:
            # If this fails, the next save of the step or the next start of the run removes the files.
            with contextlib.suppress(OSError):
                catalog.discard_incomplete(self.folder, step)


class _ExportError(Exception):
    """Raised if the model was saved, but not in the requested format; the message gives the cause."""


def _background_thread() -> ThreadPoolExecutor:
    """Return a one-thread executor on the caller's CUDA device. Otherwise, DCP would create a context on device 0."""
    initializer: Callable[[], None] | None = None
    if torch.cuda.is_initialized():
        initializer = functools.partial(torch.cuda.set_device, torch.cuda.current_device())
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=initializer)


# Staging in CPU memory


def stage(
    states: Mapping[str, Entries], empty_like: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, dict[str, torch.Tensor | str]]:
    """Return a copy of `states` with this rank's tensor shards in CPU memory. The copy is complete on return.
    `empty_like` returns an uninitialized, contiguous CPU tensor with the shape and dtype of its argument."""

    def copy(value: torch.Tensor | str) -> torch.Tensor | str:
        if isinstance(value, str):
            return value
        local = _local(value)
        staged = empty_like(local).copy_(local, non_blocking=True)
        # `DTensor.from_local` would move the copy to the mesh's device.
        return dtensor_like(staged, value) if isinstance(value, DTensor) else staged

    with torch.no_grad():
        staged = {name: {key: copy(value) for key, value in entries.items()} for name, entries in states.items()}
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return staged


@dataclasses.dataclass(frozen=True)
class SharedBufferRef:
    """Location of a contiguous tensor in `SharedMemory`; `offset` is in bytes."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def tensor(self, memory: mmap.mmap | None) -> torch.Tensor:
        if self.shape.numel() == 0 or memory is None:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=self.shape.numel(), offset=self.offset)
        return flat.view(self.shape)


class SharedMemory:
    """CPU memory shared with another process by file descriptor, pinned if CUDA is available. Linux only. It grows as
    needed and is reused between saves, since pinning takes far longer than copying."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("checkpoint")
        self.n_bytes = 0
        self._memory: mmap.mmap | None = None
        self._address = 0
        self._used = 0
        self._pinned = False

    def reserve(self, states: Mapping[str, Entries]) -> None:
        """Make room for a copy of `states`, which overwrites the previous copy."""
        values = [value for entries in states.values() for value in entries.values()]
        needed = sum(_aligned(_local(value).nbytes) for value in values if not isinstance(value, str))
        self._used = 0
        if needed > self.n_bytes:
            # Map the new memory first, so that the old memory stays usable if this fails.
            os.ftruncate(self.descriptor, needed)
            memory = mmap.mmap(self.descriptor, needed, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._unpin()
            self._memory = memory
            self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            if torch.cuda.is_available():
                from torchtitan.tools.torch_private import pin_memory

                pin_memory(self._address, needed)
                self._pinned = True
            self.n_bytes = needed

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized tensor in the reserved memory, with the shape and dtype of `tensor`."""
        buffer = SharedBufferRef(self._used, tensor.shape, tensor.dtype)
        self._used += _aligned(tensor.nbytes)
        assert self._used <= self.n_bytes, "the reserved memory is too small"
        return buffer.tensor(self._memory)

    def locate(self, tensor: torch.Tensor) -> SharedBufferRef:
        """Return the location of a tensor that `empty_like` returned."""
        assert tensor.is_contiguous()
        offset = tensor.data_ptr() - self._address if tensor.numel() else 0
        assert 0 <= offset <= self.n_bytes, "the tensor is not in this memory"
        return SharedBufferRef(offset, tensor.shape, tensor.dtype)

    def close(self) -> None:
        """Release the memory; its tensors must no longer be used."""
        self._unpin()
        self._memory = None  # not closed, since tensors may still point into it
        os.close(self.descriptor)

    def _unpin(self) -> None:
        if self._pinned:
            from torchtitan.tools.torch_private import unpin_memory

            self._pinned = False
            unpin_memory(self._address)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _aligned(n_bytes: int) -> int:
    """Round `n_bytes` up to the alignment of every dtype."""
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


# Writer process


class WriterProcess:
    """Writes checkpoint files in a separate process, started on demand. `memory` must not change during `write`."""

    def __init__(self) -> None:
        self.memory = SharedMemory()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def write(self, path: str, plan: "SavePlan", planner: "SavePlanner") -> "list[WriteResult]":
        """Write the items of `plan` into the folder `path` and wait. Raise `ChildProcessError` if the process exits
        early; the next call starts a new one."""
        data: _Data = {}
        for item in plan.items:
            value = planner.resolve_data(item)
            data[item.index] = value.getvalue() if isinstance(value, io.BytesIO) else self.memory.locate(value)
        items = dataclasses.replace(plan, planner_data=None)
        reply = self._request((path, items, data, self.memory.n_bytes))
        if isinstance(reply, Exception):
            raise reply
        return reply

    def close(self) -> None:
        """Stop the process and release the memory."""
        if self._process and self._connection:
            self._connection.close()
            self._process.kill()
            self._process.wait()
        self.memory.close()

    def _request(self, request: "tuple[str, SavePlan, _Data, int]") -> Any:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process and self._connection
        try:
            self._connection.send(request)
            # A process forked from this one may keep the pipe open, so waiting for EOF is not enough.
            while not self._connection.poll(_POLL_SECONDS):
                if self._process.poll() is not None:
                    raise EOFError
            return self._connection.recv()
        except (EOFError, ConnectionError) as error:
            code = self._process.wait()
            raise ChildProcessError(f"the checkpoint writer process exited with code {code}") from error

    def _start(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection, child_end = Pipe()
        descriptors = (child_end.fileno(), self.memory.descriptor)
        arguments = [str(number) for number in (*descriptors, os.getpid())]
        # The writer needs no GPU, and would otherwise allocate memory on the first one.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
        # -P: do not import from the working directory, whose files may shadow modules.
        command = [sys.executable, "-P", "-c", f"import {__name__} as writer; writer.serve()", *arguments]
        self._process = subprocess.Popen(command, env=environment, pass_fds=descriptors, stdin=subprocess.DEVNULL)
        child_end.close()


def serve() -> None:
    """Serve requests of a `WriterProcess` until it closes the connection or its process dies."""
    descriptor, memory, parent = (int(argument) for argument in sys.argv[1:])
    # If the rank is killed, stop writing: a restarted run may use the same folder.
    signal_when_orphaned(signal.SIGKILL, parent)
    # A terminal or scheduler may signal all processes of the job; the rank handles these signals.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    while True:
        try:
            request = connection.recv()
        except (EOFError, ConnectionError):
            return
        reply: Any
        try:
            reply = _write_items(memory, *request)
        except Exception as error:  # the rank reports any error
            reply = error
        try:
            connection.send(reply)
        except (pickle.PicklingError, TypeError, AttributeError):
            connection.send(RuntimeError(repr(reply)))


def _write_items(descriptor: int, path: str, plan: "SavePlan", data: "_Data", n_bytes: int) -> "list[WriteResult]":
    from torchtitan.components.checkpoint import dcp

    memory = mmap.mmap(descriptor, n_bytes) if n_bytes else None
    values = {index: value if isinstance(value, bytes) else value.tensor(memory) for index, value in data.items()}
    return dcp.write_staged(folder_at(path), plan, values)

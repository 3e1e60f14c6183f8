"""Writes one checkpoint after another, each complete or not at all: here, in a thread, or in a process of its own.

For a save in the background, the states are first copied to CPU memory (`stage`), which is all that training waits for.
`WriterProcess` writes a rank's files from memory that it shares with the rank. Only what needs no other rank is done
there: planning, digests and the commit stay with the rank, so a process that dies is a save that failed, and no other
rank waits for it.

Why not `torch.distributed.checkpoint.async_save` with `AsyncCheckpointerType.PROCESS` (torch 2.13): tried, it runs a
script without a `__main__` guard once more, needs a process group even for one process, and when its process is killed,
every later save fails; when the rank is killed, its process writes on, up to `.metadata`, into the folder that the
rank's successor writes into. The processes form a group of their own, so one that dies leaves the other ranks' waiting
for a timeout of half an hour. Why not `DefaultStager`: it copies whole storages if a state holds a slice of one, and
shares memory through /dev/shm, which has 64 MB in a container by default.
"""

import contextlib
import ctypes
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
from torchtitan.components.checkpoint.manifest import Kind, Marker, in_words
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.state import Entries
from torchtitan.tools.errors import RunFailure
from torchtitan.tools.logging import logger
from torchtitan.tools.torch_private import dtensor_like

if TYPE_CHECKING:
    # Deferred at run time: torch.distributed.checkpoint takes a second to import.
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult

    _Data = dict[MetadataIndex, "SharedBufferRef | bytes"]

Export = Callable[[Path, Path, Ranks], None]
"""Called on every rank with the folder of a model-only checkpoint, an empty one, which it fills with what others read,
and the ranks; what it raises on one rank it raises on all."""

_MISTAKES = (TypeError, AssertionError)
_ALIGNMENT = 64
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_POLL_SECONDS = 1.0


class CheckpointSaveError(RunFailure):
    """The last save of a run failed, so its end is not on disk. The message names the checkpoint and the cause."""


class Assets(Protocol):
    """What a checkpoint carries beside the states, to be understood without the run that wrote it."""

    def write(self, folder: Path, /) -> None:
        """Write it into the folder of a step."""


@dataclasses.dataclass
class Saver:
    """Writes, commits and reports the saves of a `CheckpointManager`, of which it is a part; one at a time.

    Every rank makes the same calls. Nothing is raised for a save that fails, be it for disk, store or memory: `failure`
    has the reason, until the next one begins. A mistake in the code (`TypeError`, `AssertionError`) is raised.
    """

    folder: Folder

    ranks: Ranks
    """Who saves; in the background too, so that nothing else may use their group meanwhile."""

    async_mode: AsyncMode

    assets: Assets | None
    """What rank 0 writes into each checkpoint."""

    export: Export | None
    """Writes a checkpoint of the kind "huggingface"."""

    prune: Callable[[int], None]
    """Called on rank 0 with the step that was saved."""

    step: int = 0
    """The step of the run's newest complete checkpoint."""

    kind: Kind = "full"
    """What that checkpoint holds."""

    failure: str = ""
    """Why the most recent save failed."""

    def __post_init__(self) -> None:
        self._executor = _background_thread()
        self._in_flight: Future[None] | None = None
        self._process: WriterProcess | None = None

    def save(self, marker: Marker, entries: Mapping[str, Entries], begun: float, *, in_background: bool) -> None:
        """Write a checkpoint of `entries` as they are now; return when they are copied, if `in_background`, or written.

        Training has been blocked since `begun` (`time.perf_counter()`).
        """
        assert self._in_flight is None, "two saves at a time"
        self.failure = ""
        if not in_background:
            self._write(marker, entries, begun)
            return
        staged: dict[str, Entries] = {}
        try:
            # Together, so that no rank waits for one whose memory does not suffice.
            self.ranks.all_ranks_or_raise(lambda: staged.update(self._stage(entries)))
        except _MISTAKES:
            raise
        except Exception as error:
            self._fail(marker.step, error)
            return
        self._in_flight = self._executor.submit(self._write, marker, staged, begun, time.perf_counter())

    def wait(self) -> None:
        """Wait until the save in the background, if any, has ended."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight:
            in_flight.result()

    def close(self) -> None:
        """Wait for the save in the background and release thread, process and memory."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            if self._process:
                self._process.close()
                self._process = None

    def raise_failure(self) -> None:
        """Raise the failure of the most recent save, once, as `CheckpointSaveError`."""
        failure, self.failure = self.failure, ""
        if failure:
            raise CheckpointSaveError(failure)

    def _stage(self, entries: Mapping[str, Entries]) -> dict[str, Entries]:
        if self.async_mode == "async":
            return stage(entries, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        if self._process is None:
            self._process = WriterProcess()
        self._process.memory.reserve(entries)
        return stage(entries, self._process.memory.empty_like)

    def _write(
        self, marker: Marker, entries: Mapping[str, Entries], begun: float, unblocked: float | None = None
    ) -> None:
        """Write, commit and prune; of a copy, in the background, if training went on at `unblocked`."""
        try:
            path = self._write_complete(marker, entries, self._process if unblocked else None)
        except _MISTAKES:
            raise
        except Exception as error:  # a store's library may raise anything
            self._fail(marker.step, error)
            return
        self.step, self.kind, self.failure = marker.step, marker.kind, ""
        blocked = (unblocked or time.perf_counter()) - begun
        held = "" if marker.kind == "full" else f" ({in_words(marker.kind)}: a run resumes from a full one)"
        logger.info("saved %s%s; training was blocked for %.2f s", path, held, blocked)
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
        """Save the model as ever into a folder beside `partial`, and let `export` make from that what belongs there."""
        from torchtitan.components.checkpoint import dcp

        assert self.export, "checked by the manager"
        native = self.ranks.broadcast_from_rank0(lambda: catalog.start_native(partial))
        dcp.save(native, entries, self.ranks.group)
        try:
            self.export(Path(str(native)), Path(str(partial)), self.ranks)
            path = self._commit(partial, marker)
        except Exception as error:  # all of them: the weights are at stake
            if marker.step == self.step and self.kind == "full":
                raise  # the run's own checkpoint of this step is still there, and a run can resume from it
            self.ranks.broadcast_from_rank0(lambda: catalog.remove_checkpoint(partial) if partial.exists() else None)
            self._commit(native, dataclasses.replace(marker, kind="model_only"))
            raise _ExportError(
                f"{type(error).__name__}: {error}; the weights are kept there in our own format, "
                "and torchtitan convert makes Hugging Face files of them"
            ) from error
        if self.ranks.rank == 0:
            try:
                catalog.remove_checkpoint(native)
            except OSError as error:
                logger.warning("%s could not be removed: %s", native, error)
        return path

    def _commit(self, partial: Folder, marker: Marker) -> Folder:
        def write_assets() -> None:
            if self.assets:
                with partial.filling() as folder:
                    self.assets.write(folder)

        self.ranks.broadcast_from_rank0(write_assets)
        return catalog.commit(partial, marker, self.ranks, name=f"step-{marker.step}")

    def _fail(self, step: int, cause: Exception) -> None:
        """Report a save that failed, and remove what it wrote."""
        path = self.folder / f"step-{step}"
        reason = str(cause) if isinstance(cause, _ExportError) else f"{type(cause).__name__}: {cause}"
        self.failure = f"{path} could not be saved: {reason}"
        logger.warning("%s; older checkpoints are as they were", self.failure)
        if self.ranks.rank == 0:
            # What cannot be removed now is removed when the step is saved again or the run starts again.
            with contextlib.suppress(OSError):
                catalog.discard_incomplete(self.folder, step)


class _ExportError(Exception):
    """The model was saved, but not in the form that was asked for; the message has the cause."""


def _background_thread() -> ThreadPoolExecutor:
    """An executor of one thread with the caller's CUDA device: on the default one, 0, DCP would open a context."""
    in_thread: Callable[[], None] | None = None
    if torch.cuda.is_initialized():
        in_thread = functools.partial(torch.cuda.set_device, torch.cuda.current_device())
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=in_thread)


# Copies in CPU memory


def stage(
    states: Mapping[str, Entries], empty_like: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, dict[str, torch.Tensor | str]]:
    """Return a copy of `states`, this rank's parts of the tensors in CPU memory; complete when this returns.

    `empty_like` gives an uninitialized, contiguous tensor in CPU memory of the shape and type of its argument.
    """

    def copy(value: torch.Tensor | str) -> torch.Tensor | str:
        if isinstance(value, str):
            return value
        local = _local(value)
        staged = empty_like(local).copy_(local, non_blocking=True)
        # Not from_local, which would move the copy to the device of the mesh.
        return dtensor_like(staged, value) if isinstance(value, DTensor) else staged

    with torch.no_grad():
        staged = {name: {key: copy(value) for key, value in entries.items()} for name, entries in states.items()}
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return staged


@dataclasses.dataclass(frozen=True)
class SharedBufferRef:
    """A contiguous tensor in `SharedMemory`, `offset` bytes from its beginning."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def tensor(self, memory: mmap.mmap | None) -> torch.Tensor:
        """Return the tensor in the mapped `memory`."""
        if self.shape.numel() == 0 or memory is None:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=self.shape.numel(), offset=self.offset)
        return flat.view(self.shape)


class SharedMemory:
    """CPU memory that another process sees too, by its file descriptor; pinned if there is CUDA. Only on Linux.

    It grows to what the largest of the staged states needs and is used again for each: to pin memory takes far longer
    than to copy into it.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("checkpoint")
        self.n_bytes = 0
        self._memory: mmap.mmap | None = None
        self._address = 0
        self._used = 0
        self._pinned = False

    def reserve(self, states: Mapping[str, Entries]) -> None:
        """Make room for a copy of `states`, in place of what there was."""
        values = [value for entries in states.values() for value in entries.values()]
        needed = sum(_aligned(_local(value).nbytes) for value in values if not isinstance(value, str))
        self._used = 0
        if needed > self.n_bytes:
            # Mapped before what there was is released: if there is not enough memory, that stays as it is.
            os.ftruncate(self.descriptor, needed)
            memory = mmap.mmap(self.descriptor, needed)
            self._unpin()
            self._memory = memory
            self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            self._pin(needed)
            self.n_bytes = needed

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized tensor of the shape and type of `tensor` in the reserved room."""
        buffer = SharedBufferRef(self._used, tensor.shape, tensor.dtype)
        self._used += _aligned(tensor.nbytes)
        assert self._used <= self.n_bytes, "more than was reserved"
        return buffer.tensor(self._memory)

    def locate(self, tensor: torch.Tensor) -> SharedBufferRef:
        """Return where `tensor`, which `empty_like` gave, lies."""
        assert tensor.is_contiguous()
        offset = tensor.data_ptr() - self._address if tensor.numel() else 0
        assert 0 <= offset <= self.n_bytes, "not in this memory"
        return SharedBufferRef(offset, tensor.shape, tensor.dtype)

    def close(self) -> None:
        """Release the memory; the tensors in it must not be used any more."""
        self._unpin()
        self._memory = None  # not closed: tensors may still point into it
        os.close(self.descriptor)

    def _pin(self, n_bytes: int) -> None:
        if torch.cuda.is_available():
            from torchtitan.tools.torch_private import pin_memory

            pin_memory(self._address, n_bytes)
            self._pinned = True

    def _unpin(self) -> None:
        if self._pinned:
            from torchtitan.tools.torch_private import unpin_memory

            self._pinned = False
            unpin_memory(self._address)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _aligned(n_bytes: int) -> int:
    """`n_bytes` rounded up, so that the next tensor of any type may begin there."""
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


# The process that writes


class WriterProcess:
    """Writes the files of a checkpoint in another process, which is started when it is needed.

    What is staged in `memory` must stay as it is while `write` runs.
    """

    def __init__(self) -> None:
        self.memory = SharedMemory()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """The number of the process; None before it is started."""
        return self._process.pid if self._process else None

    def write(self, path: str, plan: "SavePlan", planner: "SavePlanner") -> "list[WriteResult]":
        """Write the items of `plan` into the folder `path`; waits until they are written.

        Raises:
            ChildProcessError: if the process ended before that. The next call starts another.
        """
        data: _Data = {}
        for item in plan.items:
            value = planner.resolve_data(item)
            data[item.index] = value.getvalue() if isinstance(value, io.BytesIO) else self.memory.locate(value)
        items = dataclasses.replace(plan, planner_data=None)
        answer = self._ask((path, items, data, self.memory.n_bytes))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process and release the memory."""
        if self._process and self._connection:
            self._connection.close()
            self._process.kill()
            self._process.wait()
        self.memory.close()

    def _ask(self, request: "tuple[str, SavePlan, _Data, int]") -> Any:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process and self._connection
        try:
            self._connection.send(request)
            # Another process that was forked here may hold the pipe open, so its end is not all to look at.
            while not self._connection.poll(_POLL_SECONDS):
                if self._process.poll() is not None:
                    raise EOFError
            return self._connection.recv()
        except (EOFError, ConnectionError) as error:
            code = self._process.wait()
            raise ChildProcessError(f"the process that writes checkpoints ended with exit code {code}") from error

    def _start(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection, theirs = Pipe()
        descriptors = (theirs.fileno(), self.memory.descriptor)
        arguments = [str(number) for number in (*descriptors, os.getpid())]
        # It needs no GPU, and would take memory on the first.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
        # -P: not the working directory, where a file may have the name of a module.
        command = [sys.executable, "-P", "-c", f"import {__name__} as writer; writer.serve()", *arguments]
        self._process = subprocess.Popen(command, env=environment, pass_fds=descriptors, stdin=subprocess.DEVNULL)
        theirs.close()


def serve() -> None:
    """Write what a `WriterProcess` asks for, until it closes the connection or its process dies."""
    descriptor, memory, parent = (int(argument) for argument in sys.argv[1:])
    # A rank that is killed must not leave something behind that writes on where its successor writes too.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # A request to stop is the rank's to answer: it may go to all processes of the terminal or of the job.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    while True:
        try:
            request = connection.recv()
        except (EOFError, ConnectionError):
            return
        answer: Any
        try:
            answer = _write_items(memory, *request)
        except Exception as error:  # all of them: the rank reports it
            answer = error
        try:
            connection.send(answer)
        except (pickle.PicklingError, TypeError, AttributeError):
            connection.send(RuntimeError(repr(answer)))


def _write_items(descriptor: int, path: str, plan: "SavePlan", data: "_Data", n_bytes: int) -> "list[WriteResult]":
    from torchtitan.components.checkpoint import dcp

    memory = mmap.mmap(descriptor, n_bytes) if n_bytes else None
    values = {index: value if isinstance(value, bytes) else value.tensor(memory) for index, value in data.items()}
    return dcp.write_staged(folder_at(path), plan, values)

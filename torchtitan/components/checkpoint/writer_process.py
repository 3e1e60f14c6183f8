"""A process that writes checkpoint files from memory shared with its rank.

The rank itself plans, computes digests and commits, so if the process dies, the save fails without
blocking the other ranks. `torch.distributed.checkpoint.async_save` with
`AsyncCheckpointerType.PROCESS` (torch 2.13) is not used: it reruns scripts without a `__main__`
guard, needs a process group even for one process, fails every save after its process is killed, and
keeps writing into the folder after the rank is killed; if one writer dies, the others wait half an
hour. `DefaultStager` copies the whole storage of a slice, and shares memory through /dev/shm (64 MB
in a container by default).
"""

import dataclasses
import io
import mmap
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from torchtitan.components.checkpoint.filesystem import folder_at
from torchtitan.components.checkpoint.state import Entries
from torchtitan.distributed.initialize import local_part
from torchtitan.tools.process import signal_when_orphaned

if TYPE_CHECKING:
    # Deferred at run time: torch.distributed.checkpoint takes a second to import.
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult

    _Data = dict[MetadataIndex, "SharedBufferRef | bytes"]

_ALIGNMENT = 64
_POLL_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class SharedBufferRef:
    """Location of a contiguous tensor in `SharedMemory`; `offset` is in bytes."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def tensor(self, memory: mmap.mmap | None) -> torch.Tensor:
        if self.shape.numel() == 0 or memory is None:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(
            memory, dtype=self.dtype, count=self.shape.numel(), offset=self.offset
        )
        return flat.view(self.shape)


class SharedMemory:
    """CPU memory shared with another process by file descriptor, pinned if CUDA is available. Linux
    only. It grows as needed and is reused between saves, since pinning takes far longer than
    copying."""

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
        needed = sum(
            _aligned(local_part(value).nbytes) for value in values if not isinstance(value, str)
        )
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
        """Return an uninitialized tensor in the reserved memory, with the shape and dtype of
        `tensor`."""
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


def _aligned(n_bytes: int) -> int:
    """Round `n_bytes` up to the alignment of every dtype."""
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


class WriterProcess:
    """Writes checkpoint files in a separate process, started on demand. `memory` must not change
    during `write`."""

    def __init__(self) -> None:
        self.memory = SharedMemory()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def write(self, path: str, plan: "SavePlan", planner: "SavePlanner") -> "list[WriteResult]":
        """Write the items of `plan` into the folder `path` and wait. Raise `ChildProcessError` if
        the process exits early; the next call starts a new one."""
        data: _Data = {}
        for item in plan.items:
            value = planner.resolve_data(item)
            data[item.index] = (
                value.getvalue() if isinstance(value, io.BytesIO) else self.memory.locate(value)
            )
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
            # A process forked from this one may keep the pipe open, so waiting for EOF is not
            # enough.
            while not self._connection.poll(_POLL_SECONDS):
                if self._process.poll() is not None:
                    raise EOFError
            return self._connection.recv()
        except (EOFError, ConnectionError) as error:
            code = self._process.wait()
            raise ChildProcessError(
                f"the checkpoint writer process exited with code {code}"
            ) from error

    def _start(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection, child_end = Pipe()
        descriptors = (child_end.fileno(), self.memory.descriptor)
        arguments = [str(number) for number in (*descriptors, os.getpid())]
        # The writer needs no GPU, and would otherwise allocate memory on the first one.
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        # -P: do not import from the working directory, whose files may shadow modules.
        command = [
            sys.executable,
            "-P",
            "-c",
            f"import {__name__} as writer; writer.serve()",
            *arguments,
        ]
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=descriptors, stdin=subprocess.DEVNULL
        )
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
        reply: object
        try:
            reply = _write_items(memory, *request)
        except Exception as error:  # the rank reports any error
            reply = error
        try:
            connection.send(reply)
        except (pickle.PicklingError, TypeError, AttributeError):
            connection.send(RuntimeError(repr(reply)))


def _write_items(
    descriptor: int, path: str, plan: "SavePlan", data: "_Data", n_bytes: int
) -> "list[WriteResult]":
    from torchtitan.components.checkpoint import dcp

    memory = mmap.mmap(descriptor, n_bytes) if n_bytes else None
    values = {
        index: value if isinstance(value, bytes) else value.tensor(memory)
        for index, value in data.items()
    }
    return dcp.write_staged(folder_at(path), plan, values)

"""A process of its own that writes a rank's files of a checkpoint, from memory that it shares with the rank.

Only what needs no other rank is done there: planning, digests and the commit stay with the rank, so a process that dies
is a save that failed, and no other rank waits for it.
"""

import ctypes
import io
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torchtitan.components.checkpoint.staging import Place, SharedMemory, map_shared

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Request:
    """What to write."""

    path: str
    """The folder, or its URL."""

    plan: SavePlan

    data: dict[MetadataIndex, Place | bytes]
    """Where the tensors of the plan's items lie, and what its other items are."""

    memory_bytes: int
    """How large the shared memory is by now."""


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

    def write(self, path: str, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write the items of `plan` into the folder `path`; waits until they are written.

        Raises:
            ChildProcessError: where the process ended before that. The next call starts another.
        """
        data: dict[MetadataIndex, Place | bytes] = {}
        for item in plan.items:
            value = planner.resolve_data(item)
            data[item.index] = value.getvalue() if isinstance(value, io.BytesIO) else self.memory.place_of(value)
        items = SavePlan(plan.items, storage_data=plan.storage_data)
        answer = self._ask(Request(path, items, data, self.memory.n_bytes))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process and let go of the memory."""
        if self._process and self._connection:
            self._connection.close()
            self._process.kill()
            self._process.wait()
        self.memory.close()

    def _ask(self, request: Request) -> Any:
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
        # Not multiprocessing, whose processes run a script without a __main__ guard once more.
        # -P: nor the working directory, where a file may have the name of a module.
        command = [sys.executable, "-P", "-m", "torchtitan.components.checkpoint.writer_process", *arguments]
        self._process = subprocess.Popen(command, env=environment, pass_fds=descriptors, stdin=subprocess.DEVNULL)
        theirs.close()


class _Received(DefaultSavePlanner):
    """The part of a planner that a writer asks: the data of each item."""

    def __init__(self, request: Request, descriptor: int):
        super().__init__()
        self._data = request.data
        self._memory = map_shared(descriptor, request.memory_bytes)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._data[write_item.index]
        return io.BytesIO(value) if isinstance(value, bytes) else value.tensor(self._memory)


def _write(request: Request, descriptor: int) -> list[WriteResult]:
    from torchtitan.components.checkpoint.store import folder_at
    from torchtitan.components.checkpoint.writing import writer_into

    writer = writer_into(folder_at(request.path))
    return writer.write_data(request.plan, _Received(request, descriptor)).wait()


def _serve(connection: Connection, descriptor: int) -> None:
    while True:
        try:
            request = connection.recv()
        except (EOFError, ConnectionError):
            return
        answer: Any
        try:
            answer = _write(request, descriptor)
        except Exception as error:  # all of them: the rank reports it
            answer = error
        try:
            connection.send(answer)
        except (pickle.PicklingError, TypeError, AttributeError):
            connection.send(RuntimeError(repr(answer)))


def main() -> None:
    """Serve one rank, until it closes the connection or dies."""
    connection, descriptor, parent = (int(argument) for argument in sys.argv[1:])
    # A rank that is killed must not leave something behind that writes on where its successor writes too.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # A request to stop is the rank's to answer: it may go to all processes of the terminal or of the job.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    _serve(Connection(connection), descriptor)


if __name__ == "__main__":
    main()

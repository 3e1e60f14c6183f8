"""Persistent Gloo processes, so that many short runs share the cost of starting them."""

import faulthandler
import logging
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Self

import torch

from tests.processes import Output, forking, use_default_start_method

_COLLECTIVE_SECONDS = 60
"""Timeout of collectives in seconds, after which the peers of a failed rank fail too."""
_RUN_SECONDS = 400
"""Seconds until a run counts as hanging."""
_SHARED_FAILURE_SECONDS = 5
"""Seconds to wait for failures of other ranks after the first one, since one of them may be the
cause."""
_RUNS_PER_PROCESS = 20
"""Runs until the processes are restarted. Every mesh leaks process groups with threads and
sockets."""


class WorkerFailure(Exception):
    """A run failed; the message has the traceback of every failed rank."""


class Workers:
    """Processes in one process group that run functions one after the other.

    They start with the first function, and restart after a failure and `runs_per_process`
    functions. Use it in a `with` statement, or `close` it.
    """

    def __init__(self, count: int, runs_per_process: int = _RUNS_PER_PROCESS):
        self.count = count
        self._runs_per_process = runs_per_process
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._runs = 0

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Run `function(*args)` in all processes and wait. The function must be defined at module
        level.

        Raises:
            WorkerFailure: if the function raised in a process, a process died, or the run timed
                out.
        """
        if self._runs == self._runs_per_process:
            self.close()
        if not self._processes:
            self._start()
        self._runs += 1
        try:
            for connection in self._connections:
                connection.send((function, args))
            failures = self._collect_failures()
        except BaseException:
            self._kill()
            raise
        if failures:
            self._kill()
            raise WorkerFailure("\n".join(failures))

    def close(self) -> None:
        """End the processes."""
        try:
            for connection in self._connections:
                connection.send(None)
            for process in self._processes:
                process.join(timeout=_SHARED_FAILURE_SECONDS)
        finally:
            self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        context = forking()
        for rank in range(self.count):
            connection, remote = context.Pipe()
            process = context.Process(
                target=_serve, args=(Output(), remote, rank, self.count, port), daemon=True
            )
            process.start()
            remote.close()
            self._processes.append(process)
            self._connections.append(connection)
        self._runs = 0

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _collect_failures(self) -> list[str]:
        """Return the error of each failed rank."""
        pending = dict(zip(self._connections, range(self.count), strict=True))
        failures: list[str] = []
        deadline = time.monotonic() + _RUN_SECONDS
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return failures or [
                    f"rank(s) {sorted(pending.values())} did not end within {_RUN_SECONDS} s"
                ]
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                failure = _receive(connection)
                if failure is not None:
                    failures.append(f"rank {rank}: {failure}")
                    deadline = min(deadline, time.monotonic() + _SHARED_FAILURE_SECONDS)
        return failures


def _receive(connection: Connection) -> str | None:
    try:
        failure: str | None = connection.recv()
    except EOFError:
        failure = "the process died"
    return failure


def _serve(output: Output, connection: Connection, rank: int, world_size: int, port: int) -> None:
    """Run received functions until None is received."""
    import torch.distributed as dist

    output.take()
    faulthandler.enable()
    use_default_start_method()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    # If a stage fails, it prints hundreds of lines with its whole schedule; the traceback is
    # reported anyway.
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_COLLECTIVE_SECONDS))
    while (task := connection.recv()) is not None:
        function, args = task
        failure = None
        try:
            function(*args)
        except BaseException:
            failure = traceback.format_exc()
        connection.send(failure)
    # Wait for all ranks: a rank that exits early can abort the communication of another.
    dist.barrier()
    dist.destroy_process_group()

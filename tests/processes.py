"""Run a function in several gloo processes, for tests of distributed code."""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.reduction
import multiprocessing.resource_tracker
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing

_ROOT = Path(__file__).resolve().parent.parent


_server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]


def forking() -> ForkServerContext:
    """Return the context whose processes are forked from a server that has imported the libraries
    (`preloaded`). They have the server's environment variables, output and error; pass on those of
    this process if they matter."""
    multiprocessing.set_forkserver_preload(["tests.uncollected", "tests.preloaded"])
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    # One thread each: the libraries' thread pools do not survive the fork.
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path):
        _server.ensure_running()
    return multiprocessing.get_context("forkserver")


def address_of_server() -> str:
    """Start the server of this process and return its address, for `use_server` in others, which
    must end before this one. What it prints is dropped, since nothing captures it."""
    with open(os.devnull, "w") as null:
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(null.fileno(), number)
        try:
            forking()
        finally:
            for number, descriptor in enumerate(kept, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
    address: str = _server._forkserver_address
    return address


def use_server(address: str) -> None:
    """Use another process's server, instead of importing everything once more."""
    _server._forkserver_address = address
    _server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # the other process has it
    _server.ensure_running = multiprocessing.resource_tracker.ensure_running


def use_default_start_method() -> None:
    """Start processes from this one as a new interpreter does. It inherits `forkserver` otherwise,
    and starts a server of its own for each of its loaders' workers, which imports everything."""
    multiprocessing.set_start_method(None, force=True)


def run_processes(function: Callable[..., None], world_size: int, *args: Any) -> None:
    """Run `function(*args)` in `world_size` processes with a common process group; it must be a
    module's function.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the first process that
            failed.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    forking()
    torch.multiprocessing.start_processes(
        _run,
        args=(Surroundings(), world_size, port, function, args),
        nprocs=world_size,
        start_method="forkserver",
    )


class Output:
    """Standard output and error of this process, to send to a new process."""

    def __init__(self) -> None:
        self._output: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_output": [multiprocessing.reduction.DupFd(number) for number in (1, 2)]
        }

    def take(self) -> None:
        """Apply them to this process."""
        for number, sent in enumerate(self._output, start=1):
            opened = sent.detach()
            os.dup2(opened, number)
            os.close(opened)


class Surroundings(Output):
    """Environment variables and output of this process, to send to a new process."""

    def __init__(self) -> None:
        super().__init__()
        self._environment = dict(os.environ)

    def take(self) -> None:
        os.environ.clear()
        os.environ |= self._environment
        super().take()


def _run(
    rank: int,
    surroundings: Surroundings,
    world_size: int,
    port: int,
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    import torch.distributed as dist

    surroundings.take()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    use_default_start_method()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        function(*args)
    except BaseException:
        # Another rank's error about the lost connection may reach the parent first.
        traceback.print_exc()
        raise
    # All ranks leave together: a rank that tears down early can abort one that is still
    # communicating.
    dist.barrier()
    dist.destroy_process_group()

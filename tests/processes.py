"""Runs a function in several gloo processes, for tests of what is distributed."""

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.multiprocessing


def run_processes(function: Callable[..., None], world_size: int, *args: Any) -> None:
    """Run `function(*args)` in `world_size` processes that share a process group; it must be a module's function.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the first process that failed.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_run, args=(world_size, port, function, args), nprocs=world_size)


def _run(rank: int, world_size: int, port: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        function(*args)
    except BaseException:
        # Another rank's complaint about the lost connection may reach the parent first.
        traceback.print_exc()
        raise
    # Leaving together: a rank that tears down early can abort one that is still communicating.
    dist.barrier()
    dist.destroy_process_group()

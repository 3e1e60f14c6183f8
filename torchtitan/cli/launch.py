"""Starts the processes of a run on this host by torch's elastic agent, and turns their fate into one exit code."""

import logging
import multiprocessing
import os
import signal
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from torchtitan.tools.logging import logger
from torchtitan.tools.signals import LAUNCHER_VARIABLE
from torchtitan.train import TOLD_BY_MESSAGE, run_worker


def launch(args: list[str], *, nodes: int, processes: int) -> int:
    """Run `torchtitan.train` with these arguments in `processes` processes on each of `nodes` hosts; the exit code.

    SIGTERM and Ctrl-C are passed on to the workers as one SIGTERM each, and the launcher then waits for as long as
    their last save takes.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _pass_on)
    os.environ[LAUNCHER_VARIABLE] = "1"
    # Each process would otherwise start a thread per core of the host.
    threads = max(1, (os.cpu_count() or 1) // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # Their own reports of a failure repeat every rank's traceback.
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    address = os.environ.get("MASTER_ADDR", "localhost")
    port = os.environ.get("MASTER_PORT", "0" if nodes == 1 else "29500")
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=processes,
        run_id="torchtitan",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{address}:{port}",
        max_restarts=0,
        # SIGTERM and SIGINT are ours: the agent would kill workers that are still saving.
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    try:
        elastic_launch(config, run_worker)(args)
    except ChildFailedError as error:
        return _report(error)
    return 0


def _pass_on(number: int, frame: FrameType | None) -> None:
    for worker in multiprocessing.active_children():
        if worker.pid is not None:
            os.kill(worker.pid, signal.SIGTERM)


def _report(error: ChildFailedError) -> int:
    """Print the failure that came first, since the others follow from it; the exit code."""
    rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
    message: Any = failure.message
    if not isinstance(message, dict):
        logger.error("rank %d: %s", rank, message)
        return 1
    summary, traceback = message["message"], message["extraInfo"]["py_callstack"]
    if failure.exitcode in TOLD_BY_MESSAGE:
        logger.error("%s", summary.partition(": ")[2])
        return failure.exitcode
    logger.error("rank %d failed:\n%s", rank, traceback)
    return 1

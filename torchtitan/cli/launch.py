"""Start the processes of a run on this host, and combine their results into one exit code and at
most one message.

PyTorch's elastic agent (2.13), the base of torchrun, cannot replace this module: its store accepts
connections on all network interfaces; it restarts workers after every failure, even a user's
mistake; after a failure it sends SIGTERM to the other ranks, which torchtitan takes as a request to
save and stop; and it limits the time for the last save. For restarts on several hosts, use torchrun
(docs/multinode.md).
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan.cli.child import how_ended
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.logging import logger
from torchtitan.tools.process import LAUNCHER_VARIABLE, StopSignals, log_stop, threads_per_process

_POLL_SECONDS = 0.1
_MAX_REPORT_BYTES = 2**17
_GRACE_SECONDS = 5.0
"""Time for other ranks to close their files after a failure."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run: their number, this host's rank, and their rendezvous address."""

    count: int
    rank: int
    address: str
    port: int

    @classmethod
    def from_environment(cls) -> "Hosts":
        """Read `NNODES`, `NODE_RANK`, `MASTER_ADDR`, `MASTER_PORT`; default: one host. Raise
        `UserError` if invalid."""
        count = environment_number("NNODES")
        if count == 1:
            return cls(count=1, rank=0, address="127.0.0.1", port=_free_port())
        for name in ("NODE_RANK", "MASTER_ADDR"):
            if name not in os.environ:
                raise UserError(f"NNODES is {count}; set the environment variable {name} too")
        rank = environment_number("NODE_RANK", default=0, minimum=0)
        require(rank < count, "NODE_RANK", rank, f"below NNODES ({count})")
        port = environment_number("MASTER_PORT", default=29500)
        return cls(count=count, rank=rank, address=os.environ["MASTER_ADDR"], port=port)


def environment_number(name: str, *, default: int = 1, minimum: int = 1) -> int:
    """Return an environment variable as a number. Raise `UserError` if it is not a number, or is
    below `minimum`."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < minimum:
        raise UserError(
            f"the environment variable {name} is '{text}', but must be a number of at least "
            f"{minimum}"
        )
    return int(text)


def launch(args: Sequence[str], *, hosts: Hosts, processes: int, max_restarts: int = 0) -> int:
    """Run `torchtitan.train` with these arguments in `processes` processes on this host, and return
    the exit code.

    Workers receive SIGTERM and Ctrl-C, and may finish their last save; a second signal kills them.
    They never outlive this process. After a crash, a killed process or a hang, all workers restart
    from the newest checkpoint, up to `max_restarts` times, unless the run was asked to stop.
    """
    workers: list[_Worker] = []
    signals = StopSignals(
        on_first=lambda number: _stop(workers, number), on_second=lambda number: _kill(workers)
    )
    try:
        failures = _run_once(workers, signals, args, hosts, processes)
        for restart in range(1, max_restarts + 1):
            if not failures or signals.first or not min(failures).passing:
                break
            logger.error("%s", min(failures).text)
            logger.warning("restart %d of %d: all processes start again", restart, max_restarts)
            # A killed worker's child processes may still hold the old port.
            hosts = dataclasses.replace(hosts, port=_free_port())
            failures = _run_once(workers, signals, args, hosts, processes)
    finally:
        _kill(workers)
        signals.close()
    return _log_failure(failures, signals.first)


class _Failure(NamedTuple):
    time: float
    """Seconds since the epoch."""
    code: int
    text: str
    passing: bool
    returncode: int


class _Worker:
    def __init__(self, args: Sequence[str], hosts: Hosts, processes: int, local_rank: int) -> None:
        self.rank = hosts.rank * processes + local_rank
        environment = {
            # By default, each process would start a thread per core of the host.
            "OMP_NUM_THREADS": str(threads_per_process(processes)),
            **os.environ,
            "RANK": str(self.rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(hosts.count * processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": hosts.address,
            "MASTER_PORT": str(hosts.port),
            LAUNCHER_VARIABLE: "1",
        }
        # -P keeps the current folder off the import path, as in this process.
        command = [sys.executable, "-P", "-m", "torchtitan.train", *args]
        # When this process ends, the connection closes, which tells the worker.
        self._connection, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(command, env=environment, stdin=theirs.fileno())

    @property
    def failed(self) -> bool:
        return self.process.returncode not in (None, 0)

    def failure(self) -> _Failure:
        """Describe the failure of this worker.

        A worker that ends without a report, for example by a signal, counts as the first to fail,
        since a failure of another rank does not end it this way. Two signals can result from
        another rank's failure and count as the last: SIGABRT, which a lost connection can cause,
        and SIGQUIT, which another rank's watchdog sends.
        """
        code = self.process.returncode
        if content := self._receive():
            report = json.loads(content)
            text = (
                f"rank {self.rank} failed:\n{report['text']}"
                if report["code"] == 1
                else report["text"]
            )
            return _Failure(report["time"], report["code"], text, report["passing"], code)
        when = float("inf") if code in (-signal.SIGABRT, -signal.SIGQUIT) else 0.0
        text = f"rank {self.rank}, process {self.process.pid}, {how_ended(code)}"
        return _Failure(when, 1, text, True, code)

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(_MAX_REPORT_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:  # no report, and a child of the worker still holds the other end
            return b""


def _stop(workers: Sequence[_Worker], number: int) -> None:
    if sys.stderr.isatty():
        # Remove a rank's live view, which draws it again, and the terminal's ^C. Bypass
        # `sys.stderr`, since the signal may have interrupted a write to it, during which this
        # thread cannot begin another.
        os.write(sys.stderr.fileno(), b"\r\033[2K")
    log_stop(number, "after this step, or immediately before the first step")
    for worker in workers:
        worker.process.terminate()


def _kill(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.wait()


def _run_once(
    workers: list[_Worker], signals: StopSignals, args: Sequence[str], hosts: Hosts, processes: int
) -> list[_Failure]:
    workers.clear()
    # Ctrl-C reaches the whole process group, and this process forwards it. The workers inherit the
    # blocked signal, so they never receive it themselves. Here it stays pending, whereas an ignored
    # one would be lost.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for local_rank in range(processes):
            # Starting many workers takes time.
            if signals.first or signal.SIGINT in signal.sigpending():
                break
            workers.append(_Worker(args, hosts, processes, local_rank))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    for worker in workers if signals.first else []:  # stop was requested before all had started
        worker.process.terminate()
    _wait(workers)
    failed = [worker for worker in workers if worker.failed]
    _kill(workers)
    return [worker.failure() for worker in failed]


def _wait(workers: Sequence[_Worker]) -> None:
    """Wait until all workers have ended, or briefly after one has failed, since the others may wait
    forever."""
    deadline = float("inf")
    while (
        any([worker.process.poll() is None for worker in workers]) and time.monotonic() < deadline
    ):
        if any(worker.failed for worker in workers):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)


def _log_failure(failures: Sequence[_Failure], stop_signal: int | None) -> int:
    """Log the first failure, which caused the others, and return the exit code."""
    if not failures:
        return 0
    if stop_signal and any(
        failure.returncode in (-signal.SIGTERM, -signal.SIGKILL) for failure in failures
    ):
        logger.warning("killed before the run could stop and save")
        return 128 + stop_signal  # as a shell reports a command ended by a signal
    first = min(failures)
    logger.error("%s", first.text)
    return first.code


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]

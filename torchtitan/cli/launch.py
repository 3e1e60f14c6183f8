"""Starts the processes of a run on this host, and turns their fate into one exit code and at most one message.

PyTorch's elastic agent (2.13), on which torchrun is built, could take its place but for four things, none of which is
an option of its: its rendezvous opens the store on all network interfaces, and whoever reaches it can write to it; it
starts the workers again after every failure, a user's mistake included; it ends the ranks that are left after a failure
by SIGTERM, our request to save and to stop; and it gives workers that are to stop a fixed time, where ours have as long
as their last save takes, or until a second signal. Several hosts that are to restart use torchrun (docs/multinode.md).
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

from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.process import LAUNCHER_VARIABLE, StopSignals, announce_stop

_POLL_SECONDS = 0.1
_MAX_REPORT_BYTES = 2**17
_GRACE_SECONDS = 5.0
"""How long the other ranks may still take, to close their files, once one has failed."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run: how many, which of them this is, and where they meet."""

    count: int
    rank: int
    address: str
    port: int

    @classmethod
    def from_environment(cls) -> "Hosts":
        """Return what `NNODES`, `NODE_RANK`, `MASTER_ADDR` and `MASTER_PORT` say, by default one host. Raises
        `UserError` for a value that cannot be used, or one that several hosts need and that is not set."""
        count = environment_number("NNODES", default=1, minimum=1)
        if count == 1:
            return cls(count=1, rank=0, address="127.0.0.1", port=_free_port())
        for name in ("NODE_RANK", "MASTER_ADDR"):
            if name not in os.environ:
                raise UserError(f"NNODES is {count}, which needs the environment variable {name} too")
        rank = environment_number("NODE_RANK", default=0, minimum=0)
        if rank >= count:
            raise UserError(f"NODE_RANK is {rank}, and must be below NNODES, {count}")
        port = environment_number("MASTER_PORT", default=29500, minimum=1)
        return cls(count=count, rank=rank, address=os.environ["MASTER_ADDR"], port=port)


def environment_number(name: str, *, default: int, minimum: int) -> int:
    """Return an environment variable as a number; raises `UserError` if it is none, or below `minimum`."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < minimum:
        raise UserError(f"the environment variable {name} is '{text}', and must be a number of at least {minimum}")
    return int(text)


def launch(args: Sequence[str], *, hosts: Hosts, processes: int, max_restarts: int = 0) -> int:
    """Run `torchtitan.train` with these arguments in `processes` processes on this host; the exit code.

    SIGTERM and Ctrl-C are passed on to the workers, and are waited for as long as their last save takes; a second one
    ends them at once. They do not outlive this process, however it ends.

    After a failure that may pass (a crash, a killed process, a hang) all workers are ended and started again, up to
    `max_restarts` times, and go on from the newest checkpoint. A request to stop is never answered so.
    """
    workers: list[_Worker] = []
    signals = StopSignals(
        on_first=lambda number: _stop(workers, number),
        on_second=lambda number: _kill(workers),
    )
    try:
        failures = _run_once(workers, signals, args, hosts, processes)
        for restart in range(1, max_restarts + 1):
            if not failures or signals.first or not min(failures).passing:
                break
            logger.error("%s", min(failures).text)
            logger.warning("restart %d of %d: all processes start again", restart, max_restarts)
            # At another port: what a killed worker had started may still hold this one.
            hosts = dataclasses.replace(hosts, port=_free_port())
            failures = _run_once(workers, signals, args, hosts, processes)
    finally:
        _kill(workers)
        signals.close()
    return _outcome(failures, signals.first)


class _Failure(NamedTuple):
    """A worker that ended, and not well."""

    time: float
    """Seconds since the epoch."""
    code: int
    """The exit code to give."""
    text: str
    passing: bool
    """Whether the run may well succeed when it is started again."""
    returncode: int
    """How the process itself ended."""


class _Worker:
    """A training process, and a connection over which it says what made it fail."""

    def __init__(self, args: Sequence[str], hosts: Hosts, processes: int, local_rank: int) -> None:
        self.rank = hosts.rank * processes + local_rank
        environment = {
            # Each process would otherwise start a thread per core of the host.
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
            **os.environ,
            "RANK": str(self.rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(hosts.count * processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": hosts.address,
            "MASTER_PORT": str(hosts.port),
            LAUNCHER_VARIABLE: "1",
        }
        # -P: the current folder stays off the import path, as in this process.
        command = [sys.executable, "-P", "-m", "torchtitan.train", *args]
        # That it is closed also tells the worker that this process has ended.
        self._connection, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(command, env=environment, stdin=theirs.fileno())

    @property
    def failed(self) -> bool:
        """Whether it has ended, and not well."""
        return self.process.returncode not in (None, 0)

    def failure(self) -> _Failure:
        """What to say of it, now that it has failed.

        One that failed without a report, as by a signal, counts as the first: nothing that befalls another rank makes
        it end like that. But for two that count as the last: an abort, which losing the connection to another rank can
        bring about, and the signal by which the watchdog of another rank ends one that does not answer.
        """
        code = self.process.returncode
        if content := self._receive():
            report = json.loads(content)
            text = f"rank {self.rank} failed:\n{report['text']}" if report["code"] == 1 else report["text"]
            return _Failure(report["time"], report["code"], text, report["passing"], code)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = " (the host may have run out of memory)" if code == -signal.SIGKILL else ""
        when = float("inf") if code in (-signal.SIGABRT, -signal.SIGQUIT) else 0.0
        return _Failure(when, 1, f"rank {self.rank}, process {self.process.pid}, {how}{hint}", True, code)

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(_MAX_REPORT_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:  # nothing, and a process that the worker started still holds the other end
            return b""


def _stop(workers: Sequence[_Worker], number: int) -> None:
    announce_stop(number, "after this step, or at once if it has not made one")
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
    """Fill `workers` with new ones, and wait for their end: the failures."""
    workers.clear()
    # The workers inherit that they ignore Ctrl-C, which reaches the whole process group: they hear of it from here.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for local_rank in range(processes):
        if signals.first:  # many workers take long to start, and are not wanted any more
            break
        workers.append(_Worker(args, hosts, processes, local_rank))
    signal.signal(signal.SIGINT, handler)
    for worker in workers if signals.first else []:  # it arrived when they were not all there
        worker.process.terminate()
    _wait(workers)
    failed = [worker for worker in workers if worker.failed]
    _kill(workers)
    return [worker.failure() for worker in failed]


def _wait(workers: Sequence[_Worker]) -> None:
    """Wait until all have ended or, once one has failed, for a while longer: without it the others may wait forever."""
    deadline = float("inf")
    while any([worker.process.poll() is None for worker in workers]) and time.monotonic() < deadline:
        if any(worker.failed for worker in workers):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)


def _outcome(failures: Sequence[_Failure], stop_signal: int | None) -> int:
    """The exit code, after the failure that came first is told: the others follow from it."""
    if not failures:
        return 0
    if stop_signal and any(failure.returncode in (-signal.SIGTERM, -signal.SIGKILL) for failure in failures):
        logger.warning("ended before the run could stop in an orderly way")
        return 128 + stop_signal  # what a shell reports for a command that a signal ended
    first = min(failures)
    logger.error("%s", first.text)
    return first.code


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]

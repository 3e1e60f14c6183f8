"""Processes that a command runs: other commands of torchtitan, and scripts."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import IO, NamedTuple

from torchtitan.tools.process import StopSignals, signal_when_orphaned


class Ended(NamedTuple):
    """A process that has ended."""

    code: int
    """Exit code; 128 plus a signal that this process got and passed on; minus another signal that
    ended it."""
    stopped_by: int | None
    """The signal that was passed on."""
    output: bytes
    """Its standard output, if that is a pipe."""


def how_ended(code: int) -> str:
    """Return the end of a process, by its exit code or minus the signal that ended it, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (the host may have run out of memory)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


def run_torchtitan(
    words: Sequence[str], *, stdout: IO[bytes] | int | None, stderr: IO[bytes] | None = None
) -> Ended:
    """Run a command line of torchtitan until it ends, as `run_python` does."""
    return run_python(["-P", "-m", "torchtitan", *words], stdout=stdout, stderr=stderr)


def run_python(
    words: Sequence[str], *, stdout: IO[bytes] | int | None, stderr: IO[bytes] | None = None
) -> Ended:
    """Run this Python with arguments until it ends. It gets the first SIGTERM or SIGINT to this
    process, SIGKILL after the next one, and SIGTERM if this process dies."""
    command = [sys.executable, *words]
    stop = partial(signal_when_orphaned, signal.SIGTERM, os.getpid())
    process = subprocess.Popen(command, stdout=stdout, stderr=stderr, preexec_fn=stop)
    signals = StopSignals(on_first=process.send_signal, on_second=lambda _: process.kill())
    output, _ = process.communicate()
    signals.close()
    code = 128 + signals.first if signals.first else process.returncode
    return Ended(code, signals.first, output or b"")

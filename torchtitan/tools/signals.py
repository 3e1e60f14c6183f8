"""Stopping on request: SIGTERM and Ctrl-C end a run after the step in progress."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from torchtitan.tools.logging import logger

LAUNCHER_VARIABLE = "TORCHTITAN_LAUNCHED"
"""Set for the processes that our launcher starts: it passes requests to stop on, and ends them if need be."""

COMMAND_VARIABLE = "TORCHTITAN_COMMAND"
"""Holds the command that started the run, to be shown when it stops."""

_SAME_REQUEST_SECONDS = 1.0


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Within, Ctrl-C and a closed pipe end the process at once and silently, as they do any other command.

    Python's own handlers would print a traceback, or have their exception swallowed by a library being imported.
    """
    numbers = (signal.SIGINT, signal.SIGPIPE)
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopSignals:
    """From construction to `close`, tells a first SIGTERM or SIGINT from a second one.

    What arrives within a second of the first is the same request: `timeout`, for one, sends its signal to a process
    and to the process's group.

    Args:
        on_first: called with the first signal's number.
        on_second: called with each later one's.
    """

    def __init__(self, on_first: Callable[[int], None], on_second: Callable[[int], None]) -> None:
        self.first: int | None = None
        """Number of the first signal; None before it."""
        self._on_first = on_first
        self._on_second = on_second
        self._first_time = 0.0
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def close(self) -> None:
        """Give the signals back to whoever handled them before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first, self._first_time = number, time.monotonic()
            self._on_first(number)
        elif time.monotonic() - self._first_time > _SAME_REQUEST_SECONDS:
            self._on_second(number)


def announce_stop(number: int, when: str = "after this step") -> None:
    """Log that a request to stop has arrived, and when the run will stop."""
    name = signal.Signals(number).name
    logger.warning("%s received: the run stops %s (a second one ends it at once)", name, when)


class StopRequest:
    """From construction to `close`, a SIGTERM or SIGINT sets `received`; a second one ends the process at once.

    Where our launcher started this process, counting signals and ending processes are the launcher's.
    """

    def __init__(self) -> None:
        self.received = False
        self._launched = LAUNCHER_VARIABLE in os.environ
        self._signals = StopSignals(self._request, self._end)

    def close(self) -> None:
        """Give the signals back to whoever handled them before."""
        self._signals.close()

    def _request(self, number: int) -> None:
        self.received = True
        if not self._launched:
            announce_stop(number)

    def _end(self, number: int) -> None:
        if not self._launched:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

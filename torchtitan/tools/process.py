"""The process of a run: requests to stop it, and its launcher."""

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from torchtitan.tools.logging import logger
from torchtitan.tools.redact import redact

LAUNCHER_VARIABLE = "TORCHTITAN_LAUNCHED"
"""Environment variable set by the launcher, which forwards stop signals and kills processes if
necessary."""

STARTED = time.time()
"""Time at which this process began, nearly: it is imported before all large libraries."""

COMMAND_VARIABLE = "TORCHTITAN_COMMAND"
"""Environment variable with the command that started the run, shown when it stops."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>
_SAME_REQUEST_SECONDS = 1.0
_LAUNCHER = 0  # standard input, a socket connected to the launcher
# characters, fewer than the connection's buffer, so that sending never blocks
_MAX_REPORT_LENGTH = 20_000

_reporting = threading.Lock()
_reported = False


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Let Ctrl-C and a closed pipe end the process immediately and silently within the block.
    Python's handlers would print a traceback, or raise an exception that an import may swallow."""
    numbers = (signal.SIGINT, signal.SIGPIPE)
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopSignals:
    """Call `on_first` and `on_second` with the number of a first SIGTERM or SIGINT and of later
    ones, until `close`. Signals within a second of the first count as the same request, since
    `timeout`, for example, sends two."""

    def __init__(self, on_first: Callable[[int], None], on_second: Callable[[int], None]) -> None:
        self.first: int | None = None
        self._on_first = on_first
        self._on_second = on_second
        self._first_time = 0.0
        self._previous = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGTERM, signal.SIGINT)
        }

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first, self._first_time = number, time.monotonic()
            self._on_first(number)
        elif time.monotonic() - self._first_time > _SAME_REQUEST_SECONDS:
            self._on_second(number)


def log_stop(number: int, when: str = "after this step") -> None:
    """Log that a stop signal was received, and when the run stops: in a thread, since the signal
    may have interrupted a write to standard error, during which this thread cannot begin
    another."""
    text = (
        f"{signal.Signals(number).name} received: the run stops {when} (a second signal ends it "
        "immediately)"
    )
    threading.Thread(target=logger.warning, args=(text,)).start()


class StopRequest(StopSignals):
    """Set `received` on SIGTERM or SIGINT until `close`; a second signal ends the process. In
    processes started by the launcher, the launcher handles second signals."""

    def __init__(self) -> None:
        if is_launched():
            super().__init__(on_first=lambda number: None, on_second=lambda number: None)
        else:
            super().__init__(on_first=log_stop, on_second=_kill_self)

    @property
    def received(self) -> bool:
        """True if the run should stop."""
        return self.first is not None


def _kill_self(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def signal_when_orphaned(number: int, parent: int) -> None:
    """Ask the kernel to send this process a signal when its parent, a process id, ends or has
    ended, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_process(processes: int) -> int:
    """Return the threads of each of several processes that share the usable cores."""
    return max(1, usable_cores() // processes)


def use_expandable_segments() -> None:
    """Make PyTorch's allocator grow its segments of GPU memory, which wastes less of it between
    tensors of different sizes, unless the user configures the allocator. Call this before torch is
    imported."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory for the next tensors, unless the user configures it. By
    default it returns large tensors to the kernel, which then clears each of their pages when they
    are allocated again."""
    libc = ctypes.CDLL(None)
    is_configured = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if hasattr(libc, "mallopt") and not is_configured:
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def is_launched() -> bool:
    """Return whether the launcher started this process."""
    return LAUNCHER_VARIABLE in os.environ


def exit_with_launcher() -> None:
    """End this process as soon as the launcher, which holds the other end of standard input,
    ends."""
    threading.Thread(target=_wait_for_exit, name="launcher", daemon=True).start()


def report_failure(code: int, text: str, *, passing: bool) -> None:
    """Report exit code, message and whether a restart may succeed to the launcher; only the first
    call counts."""
    global _reported
    report = {
        "time": time.time(),
        "code": code,
        "text": redact(text)[-_MAX_REPORT_LENGTH:],
        "passing": passing,
    }
    with _reporting:
        if not _reported:
            os.write(_LAUNCHER, json.dumps(report, ensure_ascii=False).encode(errors="replace"))
        _reported = True


def exit_process(code: int) -> NoReturn:
    """End this process without shutting down the interpreter, which may abort if a rank was
    lost."""
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


def _wait_for_exit() -> None:
    with contextlib.suppress(OSError):
        os.read(_LAUNCHER, 1)  # returns only when the launcher ends, since it never sends anything
    os.kill(os.getpid(), signal.SIGKILL)

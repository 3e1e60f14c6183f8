"""What a training process owes the launcher that started it: to say what made it fail, and not to outlive it."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import NoReturn

from torchtitan.tools.signals import LAUNCHER_VARIABLE

_LAUNCHER = 0  # standard input: a socket whose other end is our launcher's
_MAX_REPORT_LENGTH = 20_000  # characters; the connection's buffer holds them all, so that sending never waits

_reporting = threading.Lock()
_reported = False


def is_launched() -> bool:
    """Whether our launcher started this process."""
    return LAUNCHER_VARIABLE in os.environ


def end_with_launcher() -> None:
    """From now on, end this process when the launcher, at the other end of standard input, has gone."""
    threading.Thread(target=_wait_for_its_end, name="launcher", daemon=True).start()


def report_failure(code: int, text: str, *, passing: bool) -> None:
    """Tell the launcher what to say; it says it for the rank that failed first. Later calls change nothing.

    Args:
        code: exit code that the launcher is to end with.
        text: what it is to print.
        passing: whether the same run may well succeed when it is started again.
    """
    global _reported
    report = {"time": time.time(), "code": code, "text": text[-_MAX_REPORT_LENGTH:], "passing": passing}
    with _reporting:
        if not _reported:
            os.write(_LAUNCHER, json.dumps(report, ensure_ascii=False).encode(errors="replace"))
        _reported = True


def leave(code: int) -> NoReturn:
    """End this process at once, whatever its threads do.

    Not through the interpreter's own end: what is left of a process group that lost a rank may abort there.
    """
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


def _wait_for_its_end() -> None:
    with contextlib.suppress(OSError):
        os.read(_LAUNCHER, 1)  # it never sends anything
    os.kill(os.getpid(), signal.SIGKILL)

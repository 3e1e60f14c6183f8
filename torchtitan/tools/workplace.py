"""A folder in which something is written before it gets its final name, of which nothing stays behind."""

import contextlib
import fcntl
import glob
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from torchtitan.tools.logging import logger

_LOCK = "workplace.lock"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def workplace(target: Path) -> Iterator[Path]:
    """Yield a new folder next to `target`, named `{target}.….partial`; remove it when the block ends, or when Ctrl-C,
    SIGTERM or SIGHUP ends the process.

    SIGKILL leaves the folder: the next call for the same target removes it. A process holds a lock on its folder as
    long as it lives, so that no folder in use is ever removed. Only the main thread can call this.
    """
    _remove_abandoned(target)
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent))

    def end(number: int, frame: FrameType | None) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # `nohup` ignores SIGHUP, and so does this.
    caught = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, end) for number in caught}
    try:
        with open(folder / "new.lock", "wb") as lock:
            with contextlib.suppress(OSError):  # on a file system without locks, nothing is ever removed
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(lock.name).rename(folder / _LOCK)  # after it is locked: under this name, others try to lock it
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _remove_abandoned(target: Path) -> None:
    """Remove the folders of processes that were killed while they wrote `target`."""
    for path in target.parent.glob(f"{glob.escape(target.name)}.*.partial/{_LOCK}"):
        with contextlib.suppress(OSError), open(path, "rb+") as lock:  # an error says that it is in use, or has gone
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent)
            logger.info("removed %s, left by a process that was killed", path.parent)

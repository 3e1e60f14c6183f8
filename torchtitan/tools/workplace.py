"""Temporary folder for unfinished output, which is always removed."""

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from torchtitan.tools.folder_lock import WITHOUT_LOCKS
from torchtitan.tools.logging import logger

_LOCK = "workplace.lock"
_NEW_LOCK = "new.lock"
"""Name of the lock file before it is locked."""

_NAME_BYTES = 8
_STARTING_SECONDS = 60.0
"""Age below which a folder without `_LOCK` is left alone: its process may be about to lock it."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def workplace(target: Path) -> Iterator[Path]:
    """Yield a new folder `{target}.….partial`. Remove it when the block ends, or Ctrl-C, SIGTERM or
    SIGHUP ends the process; after SIGKILL, the next call removes it. A lock protects folders in
    use. Call only in the main thread."""
    for folder in target.parent.glob(
        f"{glob.escape(target.name)}.{'[0-9a-f]' * 2 * _NAME_BYTES}.partial"
    ):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(folder)
    # Name the folder before creating it, so that the signal handler can always remove it.
    folder = target.parent / f"{target.name}.{secrets.token_hex(_NAME_BYTES)}.partial"

    def end(number: int, frame: FrameType | None) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # Keep ignoring signals that are ignored already, such as SIGHUP under `nohup`.
    caught = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, end) for number in caught}
    try:
        folder.mkdir(0o700)
        with open(folder / _NEW_LOCK, "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # on a file system without locks, no folder with content is ever removed
            except OSError as error:
                if error.errno not in WITHOUT_LOCKS:
                    raise
            # once locked, since others try to lock this name
            Path(lock.name).rename(folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _remove_if_abandoned(folder: Path) -> None:
    """Remove the folder of a killed process. Raise `OSError` if it is in use or does not exist."""
    names = os.listdir(folder)
    if _LOCK not in names and time.time() - folder.stat().st_mtime < _STARTING_SECONDS:
        return
    if not names:
        folder.rmdir()
    elif _LOCK in names or names == [_NEW_LOCK]:
        with open(folder / (_LOCK if _LOCK in names else _NEW_LOCK), "rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    else:
        return
    logger.info("removed %s of a killed process", folder)

"""Lock on the folder of a run, released when the process releases it or ends."""

import errno
import fcntl
import os
import socket
import time
import weakref
from pathlib import Path

from torchtitan.tools import durable
from torchtitan.tools.errors import UserError, os_errors_as
from torchtitan.tools.logging import logger

FILE = "run.lock"
"""Lock file, which is not removed on release."""

_WAIT_SECONDS = 5.0
"""Maximum time to wait for another process, since a killed process may take a moment to end."""

_POLL_SECONDS = 0.1
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Errors of file systems without locks."""


class FolderLock:
    """The operating system's lock on `run.lock` in a folder, taken by `lock_folder`. It never
    outlives the process, even after SIGKILL: programs started by the process do not inherit the
    open file, and forks close it at once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._descriptor = _open(folder / FILE)
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def take(self) -> None:
        """Take the lock, and write this process and host into the file. Raise `UserError` if
        another process holds the lock, `OSError` if the file cannot be locked or written."""
        deadline = time.monotonic() + _WAIT_SECONDS
        waiting = False
        while not self._try():
            if time.monotonic() >= deadline:
                raise UserError(
                    f"--dump_folder '{self.folder}' is in use by another run, {self._holder()}; "
                    "wait until it ends, or choose another folder"
                )
            if not waiting:
                logger.info(
                    "waiting for another run (%s) to release '%s'", self._holder(), self.folder
                )
            waiting = True
            time.sleep(_POLL_SECONDS)
        os.truncate(self._descriptor, 0)
        os.pwrite(
            self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0
        )

    def release(self) -> None:
        self._close()

    def _try(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            logger.warning(
                "the file system of '%s' has no locks: do not use this folder for other runs",
                self.folder,
            )
        return True

    def _holder(self) -> str:
        text = os.pread(self._descriptor, 500, 0).decode(errors="replace").strip()
        return text if text and text.isprintable() else "an unknown process"


def _open(path: Path) -> int:
    """Open the file. Reject a link, which could point to any file of the user."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"'{path}' is a link; remove it") from error
        raise


_locks: "weakref.WeakValueDictionary[Path, FolderLock]" = weakref.WeakValueDictionary()


def lock_folder(folder: Path) -> FolderLock:
    """Lock `folder`, created if necessary, against other processes for the life of the returned
    object. All calls for a folder share the object. Raise `UserError` if another process holds the
    lock, or `folder` is not writable."""
    path = folder.resolve()
    if (lock := _locks.get(path)) is not None:
        return lock
    with os_errors_as(f"--dump_folder '{folder}' cannot be written"):
        durable.make_folder(folder)
        lock = FolderLock(folder)
        lock.take()
    _locks[path] = lock
    return lock


def _release_all() -> None:
    for lock in list(_locks.values()):
        lock.release()
    _locks.clear()


# A forked process shares the open file, which would keep the lock after its owner has ended.
os.register_at_fork(after_in_child=_release_all)

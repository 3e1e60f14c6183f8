"""A separate disk for a run, to cut its power or fill it for a while."""

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

_MIB = 1 << 20
_SIZE = 512 * _MIB
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN, _IOR('X', 125, __u32)
# EXT4_GOING_FLAGS_NOLOGFLUSH: all that has not been synced is lost
_WITHOUT_LOG = struct.pack("I", 2)
_UMOUNT_TRIES = 100


class Disk:
    """An ext4 file system in a file, mounted at `path` within the `with` statement; see `obstacle`
    for its needs.

    Args:
        place: an empty folder, for the file and the mount point.
    """

    def __init__(self, place: Path):
        self.path = place / "mounted"
        self._image = place / "image"

    @staticmethod
    def obstacle() -> str:
        """Return the reason why this system cannot have one, or an empty string."""
        if sys.platform != "linux":
            return f"it needs Linux, and this is {sys.platform}"
        if os.geteuid() != 0:
            return "mounting a disk image needs root"
        if missing := [
            program for program in ("mkfs.ext4", "mount", "umount") if shutil.which(program) is None
        ]:
            return f"{missing[0]} is not installed"
        return "" if os.path.exists("/dev/loop-control") else "there are no loop devices"

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True)
        with self._image.open("wb") as image:
            image.truncate(_SIZE)
        _call("mkfs.ext4", "-q", "-m", "0", str(self._image))
        self._mount()
        return self

    def __exit__(self, *_: object) -> None:
        self._unmount()
        self._image.unlink()

    def cut_power(self) -> None:
        """Stop all writes and lose unsynced data; `restart` brings back the rest."""
        root = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(root, _SHUTDOWN, _WITHOUT_LOG)
        finally:
            os.close(root)

    def restart(self) -> None:
        """Mount the disk again, once no process uses it."""
        self._unmount()
        self._mount()

    @contextlib.contextmanager
    def full(self, spared: int) -> Iterator[None]:
        """Leave only about `spared` bytes free inside the `with` statement."""
        ballast = self.path / "ballast"
        with ballast.open("wb") as file:
            stat = os.statvfs(self.path)
            remaining = max(0, stat.f_bavail * stat.f_frsize - spared)
            while remaining >= stat.f_frsize:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), remaining)
                except OSError:  # the run has written in the meantime
                    remaining //= 2
                else:
                    remaining = 0 if spared else remaining
        try:
            yield
        finally:
            ballast.unlink()

    def _mount(self) -> None:
        _call("mount", "-o", "loop", str(self._image), str(self.path))

    def _unmount(self) -> None:
        for _ in range(_UMOUNT_TRIES):  # a killed process may hold it for a moment
            if subprocess.run(["umount", str(self.path)], capture_output=True).returncode == 0:
                return
            time.sleep(0.1)
        _call("umount", str(self.path))


def _call(*words: str) -> None:
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"{' '.join(words)}: {result.stderr.strip()}")

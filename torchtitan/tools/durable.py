"""Durable writes: files and folders are synced before they are renamed to their final names, and
the parent folder afterwards, so that anything with its final name survives a power failure."""

import contextlib
import errno
import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

SUFFIX = ".tmp"
"""End of the names of files that are being written."""

_NAME_BYTES = 8
_MOST_NAME_BYTES = 255


def write(path: Path, content: bytes | str) -> None:
    """Write or replace a file atomically."""
    with in_place_of(path) as unfinished, new_file(unfinished) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write arrays and other content, with `write` only. When the block ends, the
    content is on the disk; raise `OSError` if any of it did not arrive. NumPy's `tofile` raises
    nothing if a full disk refuses the last bytes of an array."""
    with open(path, "wb") as file:
        yield file
        n_written = file.tell()
        file.flush()
        os.fsync(file.fileno())
    if (n_bytes := path.stat().st_size) != n_written:
        raise OSError(
            errno.EIO, f"{path} has {n_bytes:,} bytes, of {n_written:,} that were written"
        )


@contextlib.contextmanager
def in_place_of(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write, which replaces `path` after the block, or is removed after
    an error."""
    _remove_abandoned(path)
    unfinished, lock = _new_file(path)
    try:
        yield unfinished
        replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    finally:
        os.close(lock)


def _new_file(path: Path) -> tuple[Path, int]:
    """Create an empty file with a name that nobody can guess or occupy, such as by a link to
    another file. Return it with a descriptor that locks it while this process lives."""
    while True:
        unfinished = path.with_name(f"{_stem_of(path)}.{secrets.token_hex(_NAME_BYTES)}{SUFFIX}")
        descriptor = os.open(
            unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
        )
        if _is_locked_now(descriptor) is not False and unfinished.exists():
            return unfinished, descriptor
        os.close(descriptor)  # another process treated it as a leftover file


def _is_locked_now(descriptor: int) -> bool | None:
    """Lock an open file. Return False if another process holds the lock, None if the file system
    has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _stem_of(path: Path) -> str:
    """Return the name of a file, shortened so that the temporary name is not longer than file
    systems allow."""
    longest = _MOST_NAME_BYTES - len(f".{'0' * 2 * _NAME_BYTES}{SUFFIX}")
    return os.fsencode(path.name)[:longest].decode(errors="ignore")


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary files for `path` that killed processes left, which nobody locks."""
    pattern = f"{glob.escape(_stem_of(path))}.{'[0-9a-f]' * 2 * _NAME_BYTES}{SUFFIX}"
    for file in path.parent.glob(pattern):
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            if _is_locked_now(descriptor):
                file.unlink()
            os.close(descriptor)


def replace(file: Path, target: Path) -> None:
    """Rename a complete file to its final name, replacing any existing file."""
    sync(file)
    file.replace(target)
    sync_folder(target.parent)


def rename(folder: Path, target: Path) -> None:
    """Rename a complete folder to its final name. Raise `OSError` if `target` is not empty."""
    sync_tree(folder)
    folder.rename(target)
    sync_folder(target.parent)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_tree(folder: Path) -> None:
    """Sync a folder and everything in it."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync_folder(Path(parent))


def sync(path: Path) -> None:
    """Sync the content of a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder if the file system supports it."""
    try:
        sync(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise

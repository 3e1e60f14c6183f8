"""Durable writes: files and folders are synced before they are renamed to their final names, and the parent folder
afterwards, so that anything with its final name survives a power failure."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write(path: Path, content: bytes | str) -> None:
    """Write or replace a file atomically."""
    with in_place_of(path) as unfinished, new_file(unfinished) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write arrays and other content, with `write` only. When the block ends, the content is on the
    disk; raise `OSError` if any of it did not arrive. NumPy's `tofile` raises nothing if a full disk refuses the last
    bytes of an array."""
    with open(path, "wb") as file:
        yield file
        n_written = file.tell()
        file.flush()
        os.fsync(file.fileno())
    if (n_bytes := path.stat().st_size) != n_written:
        raise OSError(errno.EIO, f"{path} has {n_bytes:,} bytes, of {n_written:,} that were written")


@contextlib.contextmanager
def in_place_of(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write, which replaces `path` after the block, or is removed after an error."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        yield unfinished
        replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


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

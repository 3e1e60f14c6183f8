"""Files and folders that outlast a power failure from the moment they have their names.

A file system puts content on the disk when it likes: after a power failure a file may have its name and be empty. So
what claims to be complete is synced before it gets its name, and the folder that holds the name after that.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


def write(path: Path, content: bytes | str) -> None:
    """Write a file, in place of one that is there: as a whole or not at all."""
    with in_place_of(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def in_place_of(path: Path) -> Iterator[Path]:
    """A path beside `path` for the block to write a file to, which takes the place of `path` when the block ends. Where
    the block raises, that file is removed, and `path` is as it was."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def rename(folder: Path, target: Path) -> None:
    """Give a folder that is fully written the name that says so; raises `OSError` where `target` is not empty."""
    sync_tree(folder)
    folder.rename(target)
    sync_folder(target.parent)


def make_folder(path: Path) -> None:
    """Create a folder, and those that it is in, where they are not there."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_tree(folder: Path) -> None:
    """Make all files and folders in `folder`, and itself, outlast a power failure."""
    for place, _, names in os.walk(folder):
        for name in names:
            sync(Path(place, name))
        sync_folder(Path(place))


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, outlast a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make the names in a folder outlast a power failure, where the file system can be asked to."""
    try:
        sync(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise

"""Ways in which other programs replace the content of a file, with its size and its time of
modification as before."""

import mmap
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

Replace = Callable[[bytes], None]
"""Gives the file other content of equal size."""


def _dated(path: Path, content: bytes, like: os.stat_result) -> Path:
    path.write_bytes(content)
    os.utime(path, ns=(like.st_atime_ns, like.st_mtime_ns))
    return path


def unpacked_over(path: Path, *, first: Callable[[Path], None] = lambda path: None) -> Replace:
    """An archive whose files have fixed times is unpacked over it."""

    def replace(content: bytes) -> None:
        stat, folder = path.stat(), path.parent / "packed"
        folder.mkdir()
        _dated(folder / path.name, content, stat)
        with tarfile.open(folder / "archive.tar", "w", format=tarfile.PAX_FORMAT) as archive:
            archive.add(folder / path.name, path.name)
        first(path)
        subprocess.run(["tar", "-xf", folder / "archive.tar", "-C", path.parent], check=True)
        assert path.stat().st_mtime_ns == stat.st_mtime_ns
        shutil.rmtree(folder)

    return replace


def unpacked_again(path: Path) -> Replace:
    """It is removed, and unpacked again."""
    return unpacked_over(path, first=Path.unlink)


def in_its_inode(path: Path) -> Replace:
    """It is removed, and a new file gets its inode, if the file system uses it again."""

    def replace(content: bytes) -> None:
        stat = path.stat()
        path.unlink()
        _dated(path, content, stat)

    return replace


def copied(path: Path) -> Replace:
    """Another file of the same time is copied over it with `cp -p`."""

    def replace(content: bytes) -> None:
        other = _dated(path.with_name("other"), content, path.stat())
        subprocess.run(["cp", "-p", other, path], check=True)

    return replace


def written_in_place(path: Path) -> Replace:
    """It is written in place, and its time is set back, as rsync does."""

    def replace(content: bytes) -> None:
        stat = path.stat()
        with path.open("r+b") as file:
            file.write(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    return replace


def touched(path: Path) -> Replace:
    """It is written, and gets the time of a reference with `touch -r`."""

    def replace(content: bytes) -> None:
        reference = path.with_name("reference")
        subprocess.run(["touch", "-r", path, reference], check=True)
        path.write_bytes(content)
        subprocess.run(["touch", "-r", reference, path], check=True)

    return replace


def moved(path: Path) -> Replace:
    """Another file of the same time is moved over it."""

    def replace(content: bytes) -> None:
        _dated(path.with_name("other"), content, path.stat()).replace(path)

    return replace


def switched_link(path: Path) -> Replace:
    """It is a link, which is switched to another file, older than the first digest, of the same
    time."""
    first, second = path.with_name("first"), path.with_name("second")
    path.rename(first)
    path.symlink_to(first)
    _dated(second, bytes(first.stat().st_size), first.stat())

    def replace(content: bytes) -> None:
        _dated(second, content, first.stat())
        path.unlink()
        path.symlink_to(second)

    return replace


def switched_folder(path: Path) -> Replace:
    """It is in a folder that is a link, which is switched to another folder."""
    folder, other = (
        path.parent.with_name(f"{path.parent.name}.1"),
        path.parent.with_name(f"{path.parent.name}.2"),
    )
    path.parent.rename(folder)
    path.parent.symlink_to(folder)
    shutil.copytree(folder, other)

    def replace(content: bytes) -> None:
        _dated(other / path.name, content, path.stat())
        path.parent.unlink()
        path.parent.symlink_to(other)

    return replace


def other_name(path: Path) -> Replace:
    """It is written through another hard link, and its time is set back."""
    os.link(path, path.with_name("another_name"))
    return written_in_place(path.with_name("another_name"))


def relinked(path: Path) -> Replace:
    """Its name becomes a hard link to another file of the same time."""

    def replace(content: bytes) -> None:
        other = _dated(path.with_name("other"), content, path.stat())
        subprocess.run(["ln", "-f", other, path], check=True)

    return replace


def mapped(path: Path) -> Replace:
    """It is written through a memory map, and its time is set back."""

    def replace(content: bytes) -> None:
        stat = path.stat()
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
            pages[:] = content
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    return replace


def still_mapped(path: Path) -> Replace:
    """It is written through a memory map that has already written to the same page, and stays
    open."""
    file = path.open("r+b")
    pages = mmap.mmap(file.fileno(), 0)
    pages[:] = path.read_bytes()

    def replace(content: bytes) -> None:
        pages[:] = content
        pages.flush()

    return replace


REPLACEMENTS = (
    unpacked_over,
    unpacked_again,
    in_its_inode,
    copied,
    written_in_place,
    touched,
    moved,
    switched_link,
    switched_folder,
    other_name,
    relinked,
    mapped,
    still_mapped,
)

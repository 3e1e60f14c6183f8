"""Folders on disk that are built once per host and addressed by content.

A folder is named by a digest of all inputs that determine its content, so a finished folder never
changes. It is built under a temporary name and renamed when complete; other processes that need it
wait.

`blocks.json` holds each file's size and block checksums. Opening a folder verifies a sample of
them. A damaged folder is renamed and rebuilt.
"""

import contextlib
import functools
import io
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from torchtitan.components.checkpoint.filesystem import Folder, LocalFolder
from torchtitan.components.data.sources.source import Source, StreamSource
from torchtitan.components.data.sources.stored import StoredPart
from torchtitan.tools import durable
from torchtitan.tools.digests import (
    ENVIRONMENT_VARIABLE,
    cache_root,
    digest_of,
    file_digest,
    hash_file,
)
from torchtitan.tools.errors import UserError, os_errors_as
from torchtitan.tools.files import MOST_JSON_BYTES, named_file, open_regular
from torchtitan.tools.logging import logger

BLOCKS_FILE = "blocks.json"
BLOCK_BYTES = 1 << 18
SAMPLED_BLOCKS = 16
"""Evenly spaced blocks of each file to verify on opening, including the first and the last."""

T = TypeVar("T")


@contextmanager
def writable(root: Path) -> Iterator[None]:
    """Create the cache folder, and convert an `OSError` in the block to a `UserError`."""
    remedy = f"; set --dataloader.cache_dir or ${ENVIRONMENT_VARIABLE} to another folder"
    with os_errors_as(f"cannot write to the cache {root}", remedy):
        durable.make_folder(root)
        yield


class DamagedCache(UserError):
    """Files in a finished folder have changed or are missing."""


def open_or_build(
    parent: str,
    source: Source,
    key: Callable[[list[str]], object],
    read: Callable[[Path], T],
    write: Callable[[Path], str],
    cache_dir: str = "",
    *,
    verify: bool = False,
) -> T:
    """Open the cache folder of a source. If it is missing, one process builds it while others wait.
    A damaged folder is renamed to `NAME.damaged`, replacing an earlier one, and rebuilt. Raise
    `UserError` if the data is unusable or changed while being read, or the folder cannot be read or
    written.

    Args:
        parent: subfolder of the cache.
        source: data to prepare.
        key: maps the source's identity to a JSON-serializable value that determines the content.
        read: opens the finished folder; should use `readable`.
        write: writes into an empty folder and returns the amount as text. The folder is removed
            if it raises.
        cache_dir: see `cache_root`.
        verify: verify all checksums instead of a sample per file.
    """
    root = cache_root(cache_dir)
    identity = partial(source.identity, partial(file_digest, root))

    def opened() -> T:
        with readable(folder):
            check_blocks(LocalFolder(folder), verify)
        return read(folder)

    with writable(root):
        before = identity()
        folder = root / parent / digest_of(key(before))
        durable.make_folder(folder.parent)
        if folder.exists():
            with contextlib.suppress(DamagedCache):
                return opened()
        with _locked(folder.with_suffix(".lock"), source.name):
            if folder.exists():
                try:
                    return opened()  # built by another process in the meantime
                except DamagedCache as error:
                    damaged = folder.with_suffix(".damaged")
                    logger.warning("%s; it was renamed to %s and is rebuilt", error, damaged.name)
                    shutil.rmtree(damaged, ignore_errors=True)
                    # not removed: another run may have mapped it into memory
                    folder.rename(damaged)
            _build(folder, write, source.name, lambda: identity() == before)
        return read(folder)


def _build(
    folder: Path, write: Callable[[Path], str], name: str, unchanged: Callable[[], bool]
) -> None:
    started = time.monotonic()
    partial_folder = folder.with_suffix(".partial")
    shutil.rmtree(partial_folder, ignore_errors=True)  # left by a killed build
    partial_folder.mkdir()
    try:
        amount = write(partial_folder)
        if not unchanged():
            raise UserError(f"{name} changed while it was being read; restart when it is complete")
        record_blocks(partial_folder)
        durable.rename(partial_folder, folder)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    logger.info(
        f"prepared {name}: {amount} in {time.monotonic() - started:.1f} s, cached in {folder}"
    )


def block_checksums(file: BinaryIO) -> list[int]:
    """Return the CRC-32 of each block of `BLOCK_BYTES`."""
    return [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]


def record_blocks(folder: Path) -> None:
    """Write the sizes and checksums of a complete folder's files to `blocks.json`."""
    recorded: dict[str, tuple[int, list[int]]] = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            recorded[path.name] = path.stat().st_size, block_checksums(file)
    (folder / BLOCKS_FILE).write_text(json.dumps(recorded))


def check_content(content: bytes, name: str, recorded: str | bytes) -> None:
    """Raise `ValueError` or `LookupError` if the content of the file `name` does not match the
    content of its folder's `blocks.json`."""
    size, checksums = json.loads(recorded)[name]
    if len(content) != size or block_checksums(io.BytesIO(content)) != checksums:
        raise ValueError(f"{name} has a wrong checksum")


def check_blocks(folder: Folder, verify_all: bool) -> None:
    """Raise an error that `readable` handles if the files do not match `blocks.json`."""
    sizes = folder.files()  # only regular files: reading a pipe or a device may take forever
    if sizes.get(BLOCKS_FILE, 0) > MOST_JSON_BYTES:
        raise ValueError(f"{BLOCKS_FILE} has {sizes[BLOCKS_FILE]:,} bytes")
    recorded = json.loads(folder.read(BLOCKS_FILE))
    if unknown := {name for name in sizes if name[0] != "."} - {BLOCKS_FILE, *recorded}:
        raise ValueError(f"{min(unknown)} is not listed in {BLOCKS_FILE}")
    if missing := {*recorded} - {*sizes}:  # also paths outside the folder
        raise ValueError(f"{min(missing)!r} is missing")
    for name, (size, checksums) in recorded.items():
        n_blocks = len(checksums)
        if sizes[name] != size or n_blocks != -(-size // BLOCK_BYTES):
            raise ValueError(f"{name} has {sizes[name]} bytes, not {size}")
        for number in range(n_blocks) if verify_all else evenly_spaced(n_blocks, SAMPLED_BLOCKS):
            start = number * BLOCK_BYTES
            if zlib.crc32(folder.read_range(name, start, start + BLOCK_BYTES)) != checksums[number]:
                where = f"block {number + 1} of {n_blocks} of {name}"
                raise ValueError(f"{where} has a wrong checksum, at offset {start:,}")


def evenly_spaced(n: int, most: int) -> list[int]:
    """Return at most `most` numbers below n, including the first and the last."""
    return list(range(n)) if n <= most else [i * (n - 1) // (most - 1) for i in range(most)]


def _locked(path: Path, name: str) -> contextlib.AbstractContextManager[object]:
    """Acquire a lock, which the returned context manager releases."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        logger.info(f"waiting for another process to prepare {name}")
        return lock.acquire()


@contextmanager
def readable(folder: Path | Folder, remedy: str = "") -> Iterator[None]:
    """Convert errors in the block to `DamagedCache` if a file is missing or changed, else to
    `UserError`. `remedy` ends the message about damage."""
    try:
        yield
    except (
        FileNotFoundError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:
        if isinstance(error, UserError) and not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise DamagedCache(f"the cache {folder} is damaged ({error}){remedy}") from error
    except OSError as error:
        raise UserError(f"the cache {folder} cannot be read: {error}") from error


def map_array(path: Path, dtype: str, length: int) -> np.memmap:
    """Map a file of `length` numbers into memory. Raise `ValueError` for a wrong file size, and
    `UserError` for a link out of its folder."""
    with open_regular(named_file(path.parent, path.name, str(path.parent))) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if n_bytes != length * np.dtype(dtype).itemsize:
            raise ValueError(f"{path.name} has {n_bytes} bytes")
        return np.memmap(file, dtype=dtype, mode="r")


def data_digest(
    resolve: Callable[[str], Source | StreamSource], cache_dir: str, dataset: str
) -> str:
    """Return a digest of a dataset's content, regardless of file names and locations; empty if it
    is unknown (a stream, or deleted data)."""
    digests: list[str] = []

    def recorded_digest(path: Path) -> str:
        digests.append(file_digest(root, path))
        return digests[-1]

    root = cache_root(cache_dir)
    with contextlib.suppress(UserError), writable(root):
        source = resolve(dataset)
        if isinstance(source, StreamSource):
            _say_what_is_compared(source.name, "its name")
        else:
            identity = source.identity(recorded_digest)
            if any(isinstance(part, StoredPart) for part in source.parts):
                _say_what_is_compared(
                    source.name, "sizes, and the checksums or times that the store lists"
                )
            return digest_of(digests or identity)
    return ""


@functools.cache
def _say_what_is_compared(name: str, what: str) -> None:
    """Say once that a change of the data may not be found."""
    logger.info("%s: a run that resumes compares %s, not the content", name, what)


def content_digest(folder: Path, names: Sequence[str]) -> str:
    """Return the digest of files that were just written."""
    return digest_of([hash_file(folder / name) for name in names])

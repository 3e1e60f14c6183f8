"""Digests of content, and remembered results of computations on files.

`{cache}/digests/` has a small file for each result, named by a digest of the statuses of the files
that it was computed from, see `file_status`. Content is always read completely, once for each
status.
"""

import contextlib
import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from torchtitan.tools import durable
from torchtitan.tools.errors import UserError, os_errors_as
from torchtitan.tools.files import read_regular, regular_file
from torchtitan.tools.logging import logger
from torchtitan.tools.process import usable_cores
from torchtitan.tools.progress import progress

ENVIRONMENT_VARIABLE = "TORCHTITAN_CACHE"

DIGEST_BYTES = 16

MAX_THREADS = 8
"""Threads that hash one file, or the tensors of one checkpoint."""

_BLOCK_BYTES = 1 << 22
"""Bytes of the blocks of a file that are hashed separately."""

_LARGE = 1 << 30
"""Bytes from which on reading shows its progress, and only one process of a host reads."""

_RECENT_NS = 2_000_000_000
"""Age of a file from which on another write cannot have the same time: the coarsest times of file
systems are in steps of two seconds."""

_STEP_NS = 50_000_000
"""The same for file systems whose times are not in whole seconds: several ticks of the kernel's
clock."""

_WRITTEN_BACK_NS = 3600 * 10**9
"""Age of a file from which on the kernel has written the pages of its memory maps to the disk."""

_WITHOUT_TIMES_OF_MAPS = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
"""File systems in which a write through a memory map changes no time."""

_buffers = threading.local()


def cache_root(cache_dir: str = "") -> Path:
    """Return the first cache folder that is set: `cache_dir`, `$TORCHTITAN_CACHE`, or
    `~/.cache/torchtitan`."""
    chosen = cache_dir or os.environ.get(ENVIRONMENT_VARIABLE) or "~/.cache/torchtitan"
    return Path(os.path.expanduser(chosen))


def bytes_digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def digest_of(value: object) -> str:
    return bytes_digest(json.dumps(value).encode())


def check_digest(text: str) -> str:
    """Return `text`. Raise `ValueError` unless it is a digest."""
    if len(bytes.fromhex(text)) != DIGEST_BYTES:
        raise ValueError(f"{text[:80]!r} is not a digest")
    return text


class FileStatus(TypedDict):
    """What `file_status` returns."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def file_status(path: Path) -> FileStatus:
    """Return what changes whenever the content of a file changes, as JSON values, without reading
    the file: its path without links, its device, inode and size, and the times of its content and
    of its status in nanoseconds.

    Programs that set the time of the content back, such as tar, rsync and `cp -p`, cannot set the
    time of the status, which every write, renaming and new file changes. The status says nothing
    about a file newer than `_RECENT_NS`, a file with unwritten pages of a memory map, or a file in
    `_WITHOUT_TIMES_OF_MAPS`.
    """
    path = regular_file(path).resolve()
    # a network file system asks the server only when a file is opened
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
    return {
        "path": str(path),
        "device": found.st_dev,
        "inode": found.st_ino,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
    }


def file_digest(root: Path, path: Path) -> str:
    """Return the digest of a file's whole content, remembered in the cache folder `root`. Raise
    `UserError` if the file cannot be read, or changes while it is read."""
    return remembered(root, "XXH3-128", [path], lambda: hash_file(path))


def file_version(path: Path) -> str:
    """Return a text that changes with the content of a file, and is the same on all hosts that
    share the file; without reading the file if its status suffices. Raise `UserError` if the file
    cannot be read, or is being written."""
    with os_errors_as(f"{path} cannot be read"):
        is_coarse = file_status(path)["ctime_ns"] % 10**9 == 0
        status = _settled_status(path, _RECENT_NS if is_coarse else _STEP_NS)
        if not _shows_every_write(status):
            return f"content {hash_file(path)}"
    other = ("path", "device")  # hosts number their devices differently
    return " ".join(f"{name} {value}" for name, value in status.items() if name not in other)


def remembered(root: Path, what: str, files: Sequence[Path], compute: Callable[[], str]) -> str:
    """Return the result of `compute`, which reads the files and nothing else. Keep it in the cache
    folder `root`, and return it without reading until the status of a file changes. Of the
    processes of a host, one reads large files while the others wait. Raise `UserError` if a file
    cannot be read, or changes while it is read.

    Args:
        root: the cache folder. If it cannot be written, a warning is logged, and the files are read
            each time.
        what: what `compute` returns, including its version.
        files: regular files.
        compute: returns a line of text.
    """
    names = ", ".join(map(str, files[:3]))
    with os_errors_as(f"{names} cannot be read"):
        statuses = [file_status(path) for path in files]
        if (known := _recall(_entry(root, what, statuses))) is not None:
            return known
        with _alone(
            _entry(root, what, statuses), sum(status["size"] for status in statuses)
        ) as is_large:
            statuses = [_settled_status(path, _RECENT_NS if is_large else 0) for path in files]
            entry = _entry(root, what, statuses)
            if (known := _recall(entry)) is not None:  # of another process
                return known
            started = time.time_ns()
            result = compute()
            for path, status in zip(files, statuses, strict=True):
                if file_status(path) != status:
                    raise UserError(
                        f"{path} changed while it was being read; restart when it is complete"
                    )
    newest = max((_newest_time(status) for status in statuses), default=0)
    if started - newest > _RECENT_NS and all(map(_shows_every_write, statuses)):
        _remember(entry, result)
    return result


def _entry(root: Path, what: str, statuses: Sequence[FileStatus]) -> Path:
    return root / "digests" / digest_of([what, statuses])


def _recall(entry: Path) -> str | None:
    """Return the remembered result, unless it is absent or damaged."""
    with contextlib.suppress(OSError, ValueError):
        result, check = read_regular(entry).decode().splitlines()
        if check == digest_of([entry.name, result]):
            return result
    return None


def _remember(entry: Path, result: str) -> None:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_text(f"{result}\n{digest_of([entry.name, result])}\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            entry.unlink(missing_ok=True)
        logger.warning(
            f"digests cannot be kept in {entry.parent} ({error.strerror}), so each start reads the "
            f"files again; set ${ENVIRONMENT_VARIABLE} to another folder"
        )


@contextlib.contextmanager
def _alone(entry: Path, n_bytes: int) -> Iterator[bool]:
    """Let only one process of the host into the block if the files are large; yield whether they
    are. Where locks are not possible, several processes may read."""
    if n_bytes < _LARGE:
        yield False
        return
    from filelock import FileLock, Timeout

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):
            entry.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(f"{entry}.lock")
            try:
                stack.enter_context(lock.acquire(timeout=0))
            except Timeout:
                logger.info(
                    f"waiting for another process, which reads {n_bytes / 2**30:,.0f} GiB to "
                    "identify them"
                )
                stack.enter_context(lock.acquire())
        yield True


def _settled_status(path: Path, age: int) -> FileStatus:
    """Return the status of a file, once the file is older than `age` in nanoseconds."""
    status = file_status(path)
    if time.time_ns() - status["ctime_ns"] < _WRITTEN_BACK_NS:
        # a file system that refuses it writes maps back in its own way
        with contextlib.suppress(OSError):
            durable.sync(path)  # from now on, a write through a memory map changes the status
        status = file_status(path)
    if 0 <= (since := time.time_ns() - status["ctime_ns"]) <= age:
        time.sleep((age - since) / 1e9 + 0.001)
        if file_status(path) != status:
            raise UserError(f"{path} is still being written; restart when it is complete")
    return status


def _newest_time(status: FileStatus) -> int:
    return max(status["mtime_ns"], status["ctime_ns"])


def _shows_every_write(status: FileStatus) -> bool:
    return _kind_of_device(status["device"]) not in _WITHOUT_TIMES_OF_MAPS


@functools.cache
def _kind_of_device(device: int) -> str:
    """Return the type of the file system on a device; empty if it is not known."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                return kind.split()[0]
    return ""


def hash_file(path: Path) -> str:
    """Return the digest of a file's size and blocks, which are read and hashed in threads."""
    import xxhash

    size = path.stat().st_size
    starts = range(0, size, _BLOCK_BYTES)
    digest = xxhash.xxh3_128(f"{size} bytes in blocks of {_BLOCK_BYTES}".encode())
    with contextlib.ExitStack() as stack:
        advance = stack.enter_context(progress(f"reading {path}", size)) if size >= _LARGE else None
        blocks: Iterator[bytes] = map(functools.partial(_hash_block, path), starts)
        if len(starts) > 1:
            pool = stack.enter_context(ThreadPoolExecutor(threads()))
            blocks = pool.map(functools.partial(_hash_block, path), starts)
        for block in blocks:
            digest.update(block)
            if advance:
                advance(_BLOCK_BYTES)
    return digest.hexdigest()


def threads() -> int:
    """Return the number of threads that read and hash."""
    return min(MAX_THREADS, usable_cores())


def _hash_block(path: Path, start: int) -> bytes:
    import xxhash

    if not hasattr(_buffers, "block"):
        _buffers.block = bytearray(_BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        n_read, view = 0, memoryview(_buffers.block)
        while n_read < _BLOCK_BYTES and (more := file.readinto(view[n_read:])):
            n_read += more
    return xxhash.xxh3_128(view[:n_read]).digest()

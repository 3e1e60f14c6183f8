"""Folders on disk that are made once per host and found again by the content they were made from.

A folder's name is a digest of everything that decides what is in it, so that it never has to change once it is there.
It is written under another name and renamed when complete; meanwhile other processes that want it wait.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

ENVIRONMENT_VARIABLE = "TORCHTITAN_CACHE"

_LARGE = 4 << 30
_RECENT_NS = 2_000_000_000


def cache_root(cache_dir: str) -> Path:
    """The folder for caches: `cache_dir`, else `$TORCHTITAN_CACHE`, else `~/.cache/torchtitan`."""
    return Path(cache_dir or os.environ.get(ENVIRONMENT_VARIABLE) or "~/.cache/torchtitan").expanduser()


def digest_of(value: Any) -> str:
    """Hexadecimal digest of a JSON-ready value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


@contextmanager
def writable(root: Path) -> Iterator[None]:
    """Make the folder for caches; turn an `OSError` of the block into a `UserError` that says how to choose another."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to the token cache {root}: {error.strerror or error}; "
            f"choose another place by --dataloader.cache_dir or ${ENVIRONMENT_VARIABLE}"
        ) from error


def build_once(folder: Path, write: Callable[[Path], str], *, name: str, unchanged: Callable[[], bool]) -> None:
    """Have `folder` made by one process, if it is not there.

    Args:
        folder: appears when it is complete; its parent may not exist yet.
        write: tokenizes into the empty folder it is given and says how much that was. Where it raises, nothing is left.
        name: the data set's, for messages.
        unchanged: whether the data still is what the folder is named for; asked when all has been read.

    Raises:
        UserError: the data changed meanwhile.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        return
    with _locked(folder.with_suffix(".lock"), name):
        if not folder.exists():
            _build(folder, write, name, unchanged)


def _build(folder: Path, write: Callable[[Path], str], name: str, unchanged: Callable[[], bool]) -> None:
    started = time.monotonic()
    partial_folder = folder.with_suffix(".partial")
    shutil.rmtree(partial_folder, ignore_errors=True)  # of a build that was killed
    partial_folder.mkdir()
    try:
        amount = write(partial_folder)
        if not unchanged():
            raise UserError(f"{name} changed while it was read; start again when it is complete")
        partial_folder.rename(folder)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    logger.info(f"tokenized {name}: {amount} in {time.monotonic() - started:.1f} s, kept in {folder}")


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info(f"waiting for another process that tokenizes {name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Turn what the block finds wrong with a finished folder into a `UserError` that names it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(f"the token cache {folder} is damaged ({error}); delete it to have it made anew") from error


def map_array(path: Path, dtype: str, length: int) -> np.memmap:
    """A file of `length` numbers mapped into memory; raises `ValueError` where its size is another."""
    n_bytes = path.stat().st_size
    if n_bytes != length * np.dtype(dtype).itemsize:
        raise ValueError(f"{path.name} has {n_bytes} bytes")
    return np.memmap(path, dtype=dtype, mode="r")


def token_dtype(vocab_size: int) -> np.dtype:
    """The type that token ids are stored in: uint16, or uint32 for a vocabulary beyond 65,536."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def file_digest(root: Path, path: Path) -> str:
    """Digest of a file's content, remembered in `{root}/digests` for as long as the file's stat is the same.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    place = str(path.resolve())
    seen = {"path": place, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}
    note = root / "digests" / f"{hashlib.blake2b(place.encode(), digest_size=16).hexdigest()}.json"
    if (noted := _noted(note)) is not None and {**seen, "digest": noted.get("digest")} == noted:
        remembered: str = noted["digest"]
        return remembered
    digest = _hash(path, stat.st_size)
    # A file written just now may be written again within the resolution of its time stamp.
    if time.time_ns() - stat.st_mtime_ns > _RECENT_NS:
        note.parent.mkdir(exist_ok=True)
        temporary = note.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({**seen, "digest": digest}))
        temporary.rename(note)
    return digest


def content_digest(folder: Path, names: Sequence[str]) -> str:
    """Digest of the contents of files in a folder."""
    return digest_of([_hash(folder / name, (folder / name).stat().st_size) for name in names])


def _noted(note: Path) -> dict[str, Any] | None:
    """What a note says; None where there is none, or one that the computer's end has left empty."""
    try:
        noted = json.loads(note.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return noted if isinstance(noted, dict) else None


def _hash(path: Path, size: int) -> str:
    if size > _LARGE:
        logger.info(f"reading {path} ({size / 2**30:.0f} GiB) to see whether its tokens are in the cache")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error.strerror or error}")

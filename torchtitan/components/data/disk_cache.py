"""Folders on disk that are made once per host and found again by the content they were made from.

A folder's name is a digest of everything that decides what is in it, so that it never has to change once it is there.
It is written under another name and renamed when complete; meanwhile other processes that want it wait.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from torchtitan.tools import durable
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

ENVIRONMENT_VARIABLE = "TORCHTITAN_CACHE"

_DIGEST_BYTES = 16
_LARGE = 4 << 30
_RECENT_NS = 2_000_000_000

T = TypeVar("T")


def cache_root(cache_dir: str) -> Path:
    """The folder for caches: `cache_dir`, else `$TORCHTITAN_CACHE`, else `~/.cache/torchtitan`."""
    return Path(cache_dir or os.environ.get(ENVIRONMENT_VARIABLE) or "~/.cache/torchtitan").expanduser()


def digest_of(value: Any) -> str:
    """Hexadecimal digest of a JSON-ready value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def read_digest(path: Path) -> str:
    """The digest that is all of a file; raises `ValueError` where there is none in it."""
    text = path.read_text()
    if len(bytes.fromhex(text)) != _DIGEST_BYTES:
        raise ValueError(f"{path.name} holds no digest")
    return text


@contextmanager
def writable(root: Path) -> Iterator[None]:
    """Make the folder for caches; turn an `OSError` of the block into a `UserError` that says how to choose another."""
    try:
        durable.make_folder(root)
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to the token cache {root}: {error.strerror or error}; "
            f"choose another place by --dataloader.cache_dir or ${ENVIRONMENT_VARIABLE}"
        ) from error


class DamagedCache(UserError):
    """A finished folder is not as it was written."""


def open_or_build(
    folder: Path, read: Callable[[], T], write: Callable[[Path], str], *, name: str, unchanged: Callable[[], bool]
) -> T:
    """Open `folder`, which one process makes if it is not there. A damaged one is removed and made again.

    Args:
        folder: appears when it is complete; its parent may not exist yet.
        read: opens the finished folder, `readable` around it.
        write: tokenizes into the empty folder it is given and says how much that was. Where it raises, nothing is left.
        name: the data set's, for messages.
        unchanged: whether the data still is what the folder is named for; asked when all has been read.

    Raises:
        UserError: the data changed meanwhile, or the folder cannot be read.
    """
    durable.make_folder(folder.parent)
    if folder.exists():
        with contextlib.suppress(DamagedCache):
            return read()
    with _locked(folder.with_suffix(".lock"), name):
        if folder.exists():
            try:
                return read()  # another process has made it meanwhile
            except DamagedCache as error:
                logger.warning("%s: it is removed and made again", error)
                shutil.rmtree(folder)
        _build(folder, write, name, unchanged)
    return read()


def _build(folder: Path, write: Callable[[Path], str], name: str, unchanged: Callable[[], bool]) -> None:
    started = time.monotonic()
    partial_folder = folder.with_suffix(".partial")
    shutil.rmtree(partial_folder, ignore_errors=True)  # of a build that was killed
    partial_folder.mkdir()
    try:
        amount = write(partial_folder)
        if not unchanged():
            raise UserError(f"{name} changed while it was read; start again when it is complete")
        durable.rename(partial_folder, folder)
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
    """Turn what goes wrong in the block, which opens a finished folder, into a `UserError` that names the folder.

    Raises:
        DamagedCache: a file is missing, or not what was written.
        UserError: a file cannot be read, and may be whole.
    """
    try:
        yield
    except (FileNotFoundError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise DamagedCache(f"the token cache {folder} is damaged ({error})") from error
    except OSError as error:
        raise UserError(f"the token cache {folder} cannot be read: {error}") from error


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
    note = root / "digests" / f"{hashlib.blake2b(place.encode(), digest_size=_DIGEST_BYTES).hexdigest()}.json"
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


def sources_digest(sources: Sequence[Any], cache_dir: str) -> str:
    """Return a digest of what data sources hold, wherever their files are and whatever they are called.

    Args:
        sources: with a method `identity`, as `sources.Source` and `rows.RowSource`.
        cache_dir: as of `cache_root`; the digests of files are remembered there.

    Raises:
        UserError: a file cannot be read, or the cache cannot be written.
    """
    root = cache_root(cache_dir)
    of_files: list[str] = []

    def remembered(path: Path) -> str:
        of_files.append(file_digest(root, path))
        return of_files[-1]

    with writable(root):
        identities = [source.identity(remembered) for source in sources]
    return digest_of(of_files or identities)


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
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error.strerror or error}")

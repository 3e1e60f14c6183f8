"""Local documents as token ids on disk: made once per host, found again by content, mapped into memory.

`{cache}/tokens/{key}/` holds `tokens.bin` (uint16, or uint32 for a vocabulary beyond 65,536), `offsets.bin` (int64:
where each document begins, and the total) and `meta.json`. The key is a digest of everything that decides the tokens,
so that a folder never has to change once it is there. It is written under another name and renamed when complete.
"""

import bisect
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.components.data.encoding import document_wrapping, encode_documents
from torchtitan.components.data.packing import Array
from torchtitan.components.data.progress import progress
from torchtitan.components.data.readers import Document
from torchtitan.components.data.sources import Source
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

FORMAT_VERSION = 1
ENVIRONMENT_VARIABLE = "TORCHTITAN_CACHE"

_LARGE = 4 << 30
_RECENT_NS = 2_000_000_000


class TokenCache:
    """The token ids of a data set, document behind document, mapped into memory.

    Sending it to another process sends the folder's name only.
    """

    def __init__(self, folder: Path, names: list[str]):
        self.folder = folder
        self.names = names
        try:
            meta = json.loads((folder / "meta.json").read_text())
            self._first_documents = [0, *itertools.accumulate(meta["documents_per_part"])]
            self._tokens = _map(folder / "tokens.bin", meta["dtype"], meta["n_tokens"])
            self._offsets = _map(folder / "offsets.bin", "int64", self._first_documents[-1] + 1)
        except (OSError, ValueError) as error:
            raise UserError(f"the token cache {folder} is damaged ({error}); delete it to have it made anew") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenCache, (self.folder, self.names)

    @property
    def key(self) -> str:
        """Equal keys mean equal tokens and documents."""
        return self.folder.name

    @property
    def n_tokens(self) -> int:
        """Number of tokens, those around each document included."""
        return len(self._tokens)

    @property
    def n_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self._offsets) - 1

    def tokens(self, start: int, stop: int) -> Array:
        """Token ids from `start` up to `stop` or the end of the data."""
        return self._tokens[start:stop].astype(np.int64)

    def starts(self, start: int, stop: int) -> Array:
        """Where documents begin, start <= where < stop, counted from `start`; the end of the data is no beginning."""
        low, high = np.searchsorted(self._offsets[:-1], (start, min(stop, self.n_tokens)))
        return np.array(self._offsets[low:high]) - start

    def document_at(self, token: int) -> int:
        """Number of the document, from 0 over all files, that holds the `token`-th token."""
        return int(np.searchsorted(self._offsets, token, side="right")) - 1

    def describe(self, first: int, last: int) -> str:
        """A range of documents in words, numbered from 1 in each file."""
        if self._place(first)[0] != self._place(last)[0]:
            return f"{self.describe(first, first)} to {self.describe(last, last)}"
        name, begin = self._place(first)
        _, end = self._place(last)
        return f"{name}, document {begin}" if begin == end else f"{name}, documents {begin}-{end}"

    def _place(self, document: int) -> tuple[str, int]:
        part = bisect.bisect_right(self._first_documents, document) - 1
        return self.names[part], document - self._first_documents[part] + 1


def _map(path: Path, dtype: str, length: int) -> np.memmap:
    n_bytes = path.stat().st_size
    if n_bytes != length * np.dtype(dtype).itemsize:
        raise ValueError(f"{path.name} has {n_bytes} bytes")
    return np.memmap(path, dtype=dtype, mode="r")


def cache_root(cache_dir: str) -> Path:
    """The folder for caches: `cache_dir`, else `$TORCHTITAN_CACHE`, else `~/.cache/torchtitan`."""
    return Path(cache_dir or os.environ.get(ENVIRONMENT_VARIABLE) or "~/.cache/torchtitan").expanduser()


def open_token_cache(source: Source, tokenizer: Tokenizer, cache_dir: str = "") -> TokenCache:
    """The tokens of a source, encoded now if they are not in the cache.

    While one process encodes, others that want the same wait for it.

    Raises:
        UserError: the data is bad or empty, or the cache folder cannot be written.
    """
    root = cache_root(cache_dir)
    with _writable(root):
        (root / "tokens").mkdir(parents=True, exist_ok=True)
        digest = partial(_file_digest, root)
        identity = source.identity(digest)
        folder = root / "tokens" / _key(identity, tokenizer)
        if not folder.exists():
            with _locked(folder.with_suffix(".lock"), source.name):
                if not folder.exists():
                    _build(source, tokenizer, folder, unchanged=lambda: source.identity(digest) == identity)
    return TokenCache(folder, [part.name for part in source.parts])


def _key(identity: list[str], tokenizer: Tokenizer) -> str:
    described = json.dumps([FORMAT_VERSION, tokenizer.fingerprint, document_wrapping(tokenizer), identity])
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


@contextmanager
def _writable(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to the token cache {root}: {error.strerror or error}; "
            f"choose another place by --dataloader.cache_dir or ${ENVIRONMENT_VARIABLE}"
        ) from error


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


def _build(source: Source, tokenizer: Tokenizer, folder: Path, *, unchanged: Callable[[], bool]) -> None:
    """Encode a source into `folder`, which appears when it is complete."""
    started = time.monotonic()
    partial_folder = folder.with_suffix(".partial")
    shutil.rmtree(partial_folder, ignore_errors=True)  # of a build that was killed
    partial_folder.mkdir()
    try:
        meta = _write(source, tokenizer, partial_folder)
        if meta["n_tokens"] < 2:
            raise UserError(f"{source.name} holds no text to train on")
        if not unchanged():
            raise UserError(f"{source.name} changed while it was read; start again when it is complete")
        _warn_of_empty_parts(source, meta["documents_per_part"], partial_folder / "offsets.bin")
        (partial_folder / "meta.json").write_text(json.dumps(meta))
        partial_folder.rename(folder)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    logger.info(
        f"tokenized {source.name}: {sum(meta['documents_per_part']):,} documents, {meta['n_tokens']:,} tokens "
        f"in {time.monotonic() - started:.1f} s, kept in {folder}"
    )


def _write(source: Source, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Write the tokens and offsets; returns the content of `meta.json`."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    n_tokens = 0
    documents_per_part = [0] * len(source.parts)
    total = sum(part.size() for part in source.parts)

    def documents() -> Iterator[Document]:
        for index, part in enumerate(source.parts):
            for document in part.documents(advance):
                documents_per_part[index] += 1
                yield document

    with (
        progress(f"tokenizing {source.name}", total) as advance,
        (folder / "tokens.bin").open("wb") as tokens_file,
        (folder / "offsets.bin").open("wb") as offsets_file,
    ):
        offsets_file.write(np.int64(0).tobytes())
        for piece in encode_documents(documents(), tokenizer):
            tokens_file.write(np.array(piece.ids, dtype).tobytes())
            n_tokens += len(piece.ids)
            if piece.ends_document:
                offsets_file.write(np.int64(n_tokens).tobytes())
    return {"dtype": dtype.name, "n_tokens": n_tokens, "documents_per_part": documents_per_part}


def _warn_of_empty_parts(source: Source, documents_per_part: list[int], offsets_file: Path) -> None:
    offsets = np.memmap(offsets_file, dtype=np.int64, mode="r")
    at_bounds = offsets[[0, *itertools.accumulate(documents_per_part)]]
    empty = [part.name for part, n_tokens in zip(source.parts, np.diff(at_bounds), strict=True) if n_tokens == 0]
    if empty:
        shown = ", ".join(empty[:3]) + (", ..." if len(empty) > 3 else "")
        logger.warning(f"{len(empty)} of {len(source.parts)} files of {source.name} hold no text: {shown}")


def _file_digest(root: Path, path: Path) -> str:
    """Digest of a file's content, remembered in `{root}/digests` for as long as the file's stat is the same."""
    stat = path.stat()
    place = str(path.resolve())
    seen = {"path": place, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}
    note = root / "digests" / f"{hashlib.blake2b(place.encode(), digest_size=16).hexdigest()}.json"
    if note.exists():
        noted = json.loads(note.read_text())
        digest = noted.pop("digest")
        if noted == seen:
            return digest
    digest = _hash(path, stat.st_size)
    # A file written just now may be written again within the resolution of its time stamp.
    if time.time_ns() - stat.st_mtime_ns > _RECENT_NS:
        note.parent.mkdir(exist_ok=True)
        temporary = note.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({**seen, "digest": digest}))
        temporary.rename(note)
    return digest


def _hash(path: Path, size: int) -> str:
    if size > _LARGE:
        logger.info(f"reading {path} ({size / 2**30:.0f} GiB) to see whether its tokens are in the cache")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error

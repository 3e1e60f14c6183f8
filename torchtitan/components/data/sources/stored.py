"""Files in a store such as s3:// or gs://, and byte ranges of JSON Lines files."""

import posixpath
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from torchtitan.components.checkpoint.filesystem import (
    StoreError,
    cause_of,
    check_access,
    is_lasting,
    open_store,
)
from torchtitan.components.data.sources.files import FilePart, file_format, supported_formats
from torchtitan.components.data.sources.lakes import reject_tables
from torchtitan.components.data.sources.rows import Document, OnRead, Part, Row, first_line
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import without_query
from torchtitan.tools.logging import logger

ATTEMPTS = 6
"""Attempts to read from a store or to write to it; the waiting time doubles after each, from one
second."""

_VERSIONS = (
    "etag",
    "md5hash",
    "contentmd5",
    "mtime",
    "lastmodified",
    "modified",
    "updated",
    "created",
)
"""Names of checksums and times in stores, in lower case without separators; checksums first."""

_RESULTS = (ValueError, LookupError, TypeError, FileExistsError)
"""Errors that are not failures of a store: damaged content, or a result."""

T = TypeVar("T")


class StoredPart(Part):
    """A file in a store, or a byte range of a file's lines: the lines after a line end in the
    range, and the first line of the file. To be read, the lines are copied to a temporary file.

    Args:
        name: see `Part`.
        url: path or URL of the file.
        text_column: see `Part`.
        n_bytes: size of the file or range.
        version: any text that changes with the content of the file.
        start: first byte of the range; None: the whole file.
    """

    def __init__(
        self,
        name: str,
        url: str,
        text_column: str,
        n_bytes: int,
        version: str = "",
        start: int | None = None,
    ):
        super().__init__(
            name if start is None else f"{name}[{start}:{start + n_bytes}]", text_column
        )
        self.url = url
        self.version = version
        self._n_bytes = n_bytes
        self._start = start

    def size(self) -> int:
        return self._n_bytes

    def contents(self, digest: Callable[[Path], str]) -> list[str]:
        path = Path(without_query(self.url))
        return [f"{file_format(path)} {path.suffix} {self.size()} {self.version}".rstrip()]

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        with self._copy() as part:
            yield from part.rows(on_read)

    def documents(self, on_read: OnRead) -> Iterator[Document]:
        with self._copy() as part:
            yield from part.documents(on_read)

    @contextmanager
    def _copy(self) -> Iterator[FilePart]:
        """Yield a part of the copied lines; errors name the file in the store."""
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / posixpath.basename(without_query(self.url))
            with_patience(f"reading {self.url}", lambda: self._download(target))
            try:
                yield FilePart(self.name, target, self.text_column)
            except UserError as error:
                shown = f"{posixpath.dirname(without_query(self.url))}/{self.name}"
                raise UserError(str(error).replace(str(target), shown)) from None

    def _download(self, target: Path) -> None:
        store, path = open_store(self.url)
        if self._start is None:
            store.get_file(path, str(target))
        else:
            target.write_bytes(store.read_block(path, self._start, self._n_bytes, delimiter=b"\n"))


def divide(part: Part, n_bytes: int) -> list[Part]:
    """Divide an uncompressed JSON Lines file into byte ranges of at most `n_bytes`; return other
    parts unchanged."""
    if not isinstance(part, FilePart | StoredPart):
        return [part]
    url, size = part.url if isinstance(part, StoredPart) else str(part.path.resolve()), part.size()
    if not url.lower().endswith(".jsonl") or size <= n_bytes:
        return [part]
    sizes = {start: min(n_bytes, size - start) for start in range(0, size, n_bytes)}
    return [
        StoredPart(part.name, url, part.text_column, sizes[start], start=start) for start in sizes
    ]


def stored_files(url: str, text_column: str) -> list[StoredPart]:
    """Return the files of known formats at a URL: a file, a folder to search, or a glob pattern;
    sorted. Raise `UserError` if no such file exists, or the store cannot be read."""
    store, root = open_store(url)
    store.invalidate_cache()
    is_pattern = any(character in without_query(root) for character in "*?[")
    find = store.glob if is_pattern else store.find
    found = with_patience(f"listing {url}", lambda: find(root, detail=True))
    reject_tables(url, found)
    parts = []
    for path in sorted(
        path for path in found if file_format(Path(without_query(path))) is not None
    ):
        entry = found[path]
        if entry.get("size") is None:  # fsspec's HTTP store lists files so
            entry = with_patience(f"reading {path}", partial(store.info, path))
        if entry["type"] != "file":
            continue
        if entry.get("size") is None:
            raise UserError(
                f"{store.unstrip_protocol(path)}: the server does not state the size; download the "
                "file"
            )
        inside = path.removeprefix(root).lstrip("/")
        name = path if is_pattern else inside or posixpath.basename(without_query(path))
        stated = {re.sub("[-_]", "", key.lower()): value for key, value in entry.items() if value}
        version = next((str(stated[key]) for key in _VERSIONS if key in stated), "")
        parts.append(
            StoredPart(name, store.unstrip_protocol(path), text_column, entry["size"], version)
        )
    if not parts:
        check_access(
            url, store, posixpath.dirname(re.split(r"[*?[]", root)[0]) if is_pattern else root
        )
        raise UserError(f"{url} contains no data files ({supported_formats()})")
    if not all(part.version for part in parts):
        logger.warning(
            f"{url}: the store states neither checksums nor times; only another size counts as a "
            "change"
        )
    return parts


def with_patience(what: str, operation: Callable[[], T]) -> T:
    """Return the operation's result. If the store fails, for example because it limits requests,
    warn and try again. Raise `UserError` for a missing file or a full disk, and after `ATTEMPTS`
    attempts."""
    for attempt in range(ATTEMPTS):
        try:
            return operation()
        except Exception as error:  # stores raise their own exception classes
            if isinstance(error, _RESULTS) and not isinstance(error, StoreError):
                raise
            if is_lasting(error):
                raise UserError(f"{what} failed: {_reason(error)}") from error
            if attempt == ATTEMPTS - 1:
                raise UserError(f"{what} failed {ATTEMPTS} times: {_reason(error)}") from error
            logger.warning(f"{what} failed: {_reason(error)}; trying again in {2**attempt} s")
            time.sleep(2**attempt)
    raise AssertionError


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    is_of_server = error.__cause__ is not None or hasattr(error, "status")
    return text or (cause_of(error) if is_of_server else first_line(error))

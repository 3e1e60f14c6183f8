"""File formats: a local file in, its documents out.

Each row of a table and each whole text file is a document. Whatever is wrong with a file is a `UserError` that names
the file and the place in it.
"""

import codecs
import csv
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torchtitan.tools.errors import UserError

Document = Iterable[str]
"""The text of one document, in as many chunks as suits its reader. An empty one keeps its number and is skipped."""

OnRead = Callable[[int], None]
"""Told how many further bytes of the file have been read, for a progress bar."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
CHUNK_SIZE = 1 << 20
"""Characters of a text file read at a time."""


def file_format(path: Path) -> str | None:
    """The file's extension without a compression's, if there is a reader for it: `.jsonl` for `a.jsonl.zst`."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    suffix = name.suffix.lower()
    return suffix if suffix in _READERS else None


def supported_formats() -> str:
    """The extensions that can be read, for a message."""
    return f"{', '.join(suffix[1:] for suffix in _READERS)}, each also as {' or '.join(COMPRESSIONS)}"


def read_documents(path: Path, text_column: str, on_read: OnRead) -> Iterator[Document]:
    """The documents of a file in their order; the n-th is the file's n-th row, or line of a `.jsonl`.

    A document must be read before the next is asked for.

    Raises:
        UserError: the file cannot be opened, decompressed, decoded or parsed, or `text_column` is not in it.
    """
    suffix = file_format(path)
    assert suffix is not None, path
    with _named_errors(path):
        yield from _READERS[suffix](path, text_column, on_read)


class _CountedFile(io.FileIO):
    """A file that tells how much of it has been read."""

    def __init__(self, path: Path, on_read: OnRead):
        super().__init__(path)
        self.on_read = on_read

    def readinto(self, buffer: Any) -> int | None:
        n_bytes = super().readinto(buffer)
        self.on_read(n_bytes or 0)
        return n_bytes


def _open_bytes(path: Path, on_read: OnRead) -> IO[bytes]:
    file = io.BufferedReader(_CountedFile(path, on_read), CHUNK_SIZE)
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return file
    # pyarrow, and not gzip and zstandard: it reads both, several frames too, and notices a file that is cut off.
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), compression)


def _open_text(path: Path, on_read: OnRead, newline: str = "\n") -> IO[str]:
    return io.TextIOWrapper(_open_bytes(path, on_read), encoding="utf-8-sig", newline=newline)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Turn what Python raises while the file is read into a message that names the file and the place."""
    try:
        yield
    except UnicodeDecodeError:
        offset, line, byte = _find_bad_byte(path)
        raise UserError(
            f"{path} is not UTF-8: byte 0x{byte:02x} at offset {offset} (line {line}); convert it, or leave it out"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _find_bad_byte(path: Path) -> tuple[int, int, int]:
    """Offset in the decompressed file, line number (from 1) and value of the first byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    n_bytes, n_lines = 0, 1
    with _open_bytes(path, lambda _: None) as file:
        while True:
            chunk = file.read(CHUNK_SIZE)
            held = decoder.getstate()[0]  # the start of a character that the last chunk cut in two
            seen = held + chunk
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line = n_lines + seen[: error.start].count(b"\n")
                return n_bytes - len(held) + error.start, line, seen[error.start]
            n_bytes += len(chunk)
            n_lines += chunk.count(b"\n")


def _read_text(path: Path, text_column: str, on_read: OnRead) -> Iterator[Document]:
    yield _text_chunks(path, on_read)


def _text_chunks(path: Path, on_read: OnRead) -> Iterator[str]:
    # Its own error handling: the chunks are read by whoever takes the document, after `read_documents` has yielded.
    with _named_errors(path), _open_text(path, on_read) as file:
        while chunk := file.read(CHUNK_SIZE):
            yield chunk


def _read_json_lines(path: Path, text_column: str, on_read: OnRead) -> Iterator[Document]:
    with _open_text(path, on_read) as file:
        yield from _json_rows(path, file, 1, text_column)


def _json_rows(path: Path, lines: Iterable[str], first_line: int, text_column: str) -> Iterator[Document]:
    for number, line in enumerate(lines, first_line):
        if not line.strip():
            yield ()
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: broken JSON, {error.msg} (column {error.colno})") from None
        yield (_text_of(row, text_column, f"{path}:{number}"),)


def _read_json(path: Path, text_column: str, on_read: OnRead) -> Iterator[Document]:
    """A list of rows, read whole; or one row per line, as much of what is called `.json` in fact is."""
    with _open_text(path, on_read) as file:
        number, line = next(((n, line) for n, line in enumerate(file, 1) if not line.isspace()), (0, ""))
        if not line.lstrip().startswith("["):
            yield from _json_rows(path, itertools.chain([line], file), number, text_column)
            return
        try:
            rows = json.loads(line + file.read())
        except json.JSONDecodeError as error:
            where = f"{path}:{number + error.lineno - 1}"
            raise UserError(f"{where}: broken JSON, {error.msg} (column {error.colno})") from None
    for index, row in enumerate(rows, 1):
        yield (_text_of(row, text_column, f"{path}, element {index}"),)


def _read_csv(path: Path, text_column: str, on_read: OnRead) -> Iterator[Document]:
    csv.field_size_limit(sys.maxsize)  # the default of 131,072 characters is less than a long document
    with _open_text(path, on_read, newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            for row in rows:
                yield (_text_of(row, text_column, f"{path}:{rows.line_num}"),)
        except csv.Error as error:
            raise UserError(f"{path}:{rows.reader.line_num}: broken CSV, {error}") from None


def _read_parquet(path: Path, text_column: str, on_read: OnRead) -> Iterator[Document]:
    import pyarrow
    from pyarrow import parquet

    compressed = path.suffix.lower() in COMPRESSIONS
    try:
        # Parquet is read from its end: what is compressed as a whole has to be in memory.
        source = pyarrow.BufferReader(_open_bytes(path, lambda _: None).read()) if compressed else path
        file = parquet.ParquetFile(source)
        check_column(file.schema_arrow.names, text_column, str(path))
        n_rows, size = 0, path.stat().st_size
        for batch in file.iter_batches(batch_size=1024, columns=[text_column]):
            for value in batch.column(0).to_pylist():
                n_rows += 1
                yield (check_text(value, text_column, f"{path}, row {n_rows}"),)
            on_read(size * len(batch) // file.metadata.num_rows)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is not a readable parquet file: {error}") from None


_READERS: dict[str, Callable[[Path, str, OnRead], Iterator[Document]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _text_of(row: Any, text_column: str, where: str) -> str:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with the key {text_column!r}, found a {type(row).__name__}")
    check_column([str(name) for name in row], text_column, where)
    return check_text(row[text_column], text_column, where)


def check_column(columns: list[str], text_column: str, where: str) -> None:
    """Raise `UserError` unless `text_column` is one of the columns."""
    if text_column not in columns:
        raise UserError(
            f"{where}: no column {text_column!r}; set --dataloader.text_column to one of: {', '.join(columns)}"
        )


def check_text(value: Any, text_column: str, where: str) -> str:
    """A cell's text, empty for a null; raises `UserError` for anything else."""
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: column {text_column!r} holds a {type(value).__name__}, not text")
    return value or ""

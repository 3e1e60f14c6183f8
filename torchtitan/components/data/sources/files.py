"""Readers of local files. An invalid file raises `UserError` with its name and the position; an
invalid row is yielded with its error."""

import codecs
import csv
import io
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, AnyStr

from torchtitan.components.data.sources.rows import (
    MAX_BLANK_CHARACTERS,
    MAX_ROW_CHARACTERS,
    BlankLimit,
    Document,
    OnRead,
    Part,
    Row,
    check_column,
    first_line,
    json_elements,
    json_rows,
    numbered_lines,
    text_of,
    with_bounded_blanks,
)
from torchtitan.components.data.sources.tables import arrow_rows
from torchtitan.components.data.sources.webdataset import Member, sample_rows
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import reject_lfs_pointer

if TYPE_CHECKING:
    from _csv import Reader

    from _typeshed import WriteableBuffer

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
CHUNK_SIZE = 1 << 20

MAX_WHOLE_SIZE = 4 << 30
"""Largest list of JSON (characters) and compressed parquet file (bytes), which are read as a
whole."""


def file_format(path: Path) -> str | None:
    """Return the extension without compression, `.jsonl` for `a.jsonl.zst`; None if it has no
    reader."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    suffix = name.suffix.lower()
    return suffix if suffix in _READERS else None


def supported_formats() -> str:
    """Return the supported extensions, for a message."""
    return (
        f"{', '.join(suffix[1:] for suffix in _READERS)}, each also as {' or '.join(COMPRESSIONS)}"
    )


def read_rows(path: Path, name: str, on_read: OnRead, column: str | None = None) -> Iterator[Row]:
    """Yield the rows of a file in order; a text file is one row with the column `text`. Raise
    `UserError` if the file cannot be opened, decompressed, decoded or parsed, has no such `column`,
    or too many blank rows.

    Args:
        path: a file of a known format.
        name: file name in the rows' locations.
        on_read: see `OnRead`.
        column: column to read; None: all.
    """
    suffix = file_format(path)
    assert suffix is not None, path
    with _named_errors(path):
        reject_lfs_pointer(path)
        yield from with_bounded_blanks(_READERS[suffix](path, name, on_read, column))


class FilePart(Part):
    """One file of a source. `folder`: see `Part`; None: the file's."""

    def __init__(self, name: str, path: Path, text_column: str, folder: Path | None = None):
        super().__init__(name, text_column)
        self.path = path
        self.folder = folder or path.parent

    def size(self) -> int:
        return self.path.stat().st_size

    def contents(self, digest: Callable[[Path], str]) -> list[str]:
        return [f"{file_format(self.path)} {self.path.suffix} {digest(self.path)}"]

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        return read_rows(self.path, self.name, on_read)

    def documents(self, on_read: OnRead) -> Iterator[Document]:
        if file_format(self.path) in _TEXT_FORMATS:
            with _named_errors(self.path):
                reject_lfs_pointer(self.path)
            yield _text_chunks(self.path, on_read)
            return
        for row in read_rows(self.path, str(self.path), on_read, self.text_column):
            yield text_of(row, self.text_column)


class _CountedFile(io.FileIO):
    def __init__(self, path: Path, on_read: OnRead):
        super().__init__(path)
        self.on_read = on_read

    def readinto(self, buffer: "WriteableBuffer") -> int | None:
        n_bytes = super().readinto(buffer)
        self.on_read(n_bytes or 0)
        return n_bytes

    def readall(self) -> bytes:
        content = super().readall()
        self.on_read(len(content))
        return content


def _open_bytes(path: Path, on_read: OnRead) -> IO[bytes]:
    file = io.BufferedReader(_CountedFile(path, on_read), CHUNK_SIZE)
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return file
    if not file.peek(1):  # for pyarrow, this is a compressed file without content
        file.close()
        raise UserError(f"{path} is empty, not a compressed file; write or download it again")
    # Unlike gzip and zstandard, pyarrow reads both formats, supports several frames, and detects
    # truncation.
    import pyarrow

    stream: IO[bytes] = pyarrow.CompressedInputStream(
        pyarrow.PythonFile(file, mode="r"), compression
    )
    return stream


def _open_text(path: Path, on_read: OnRead, newline: str = "\n") -> IO[str]:
    return io.TextIOWrapper(_open_bytes(path, on_read), encoding="utf-8-sig", newline=newline)


def _ignore_progress(n_bytes: int) -> None:
    """`OnRead` that does nothing."""


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Convert read errors to a `UserError` with file name and position."""
    try:
        yield
    except UnicodeDecodeError:
        offset, line, byte = _find_bad_byte(path)
        raise UserError(
            f"{path} is not UTF-8: byte 0x{byte:02x} at offset {offset} (line {line}); convert the "
            "file to UTF-8, or remove it from the data"
        ) from None
    except OSError as error:
        cause = error.strerror or first_line(error)
        raise UserError(f"{path} cannot be read: {cause}") from error


def _find_bad_byte(path: Path) -> tuple[int, int, int]:
    """Return the decompressed offset, line number (from 1) and value of the first byte that is not
    UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    n_bytes, n_lines = 0, 1
    with _open_bytes(path, _ignore_progress) as file:
        while True:
            chunk = file.read(CHUNK_SIZE)
            pending = decoder.getstate()[0]  # start of a character that the last chunk split
            content = pending + chunk
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line = n_lines + content[: error.start].count(b"\n")
                return n_bytes - len(pending) + error.start, line, content[error.start]
            n_bytes += len(chunk)
            n_lines += chunk.count(b"\n")


def _text_chunks(path: Path, on_read: OnRead) -> Iterator[str]:
    # Errors are handled here, because chunks are read after `documents` has yielded the document.
    line, blanks = 1, BlankLimit("characters", MAX_BLANK_CHARACTERS)
    with _named_errors(path), _open_text(path, on_read) as file:
        while chunk := file.read(CHUNK_SIZE):
            _check_nul(chunk, path, line)
            blanks.count_text(chunk, f"{path}:{line}")
            yield chunk
            line += chunk.count("\n")


def _check_nul(text: str, path: Path, line: int) -> None:
    if "\0" in text:
        line += text.count("\n", 0, text.index("\0"))
        raise UserError(
            f"{path}:{line}: found a NUL character; the file may be damaged or UTF-16; convert it "
            "to UTF-8 or remove it"
        )


def _read_text(path: Path, name: str, on_read: OnRead, column: str | None) -> Iterator[Row]:
    yield Row(name, {"text": "".join(_text_chunks(path, on_read))})


def _read_json_lines(path: Path, name: str, on_read: OnRead, column: str | None) -> Iterator[Row]:
    with _open_text(path, on_read) as file:
        yield from json_rows(name, numbered_lines(file, path))


def _read_json(path: Path, name: str, on_read: OnRead, column: str | None) -> Iterator[Row]:
    """Read a list of objects as a whole, or one object per line."""
    with _open_text(path, _ignore_progress) as file:
        first = _first_text(file)
    if first.startswith("["):
        with _open_text(path, on_read) as file:
            yield from json_elements(
                name, "".join(_pieces(file, path, "write one row per line")), path
            )
        return
    if first.partition("\n")[0].strip() == "{":
        raise UserError(
            f"{path} is one object over several lines; write a list of rows, or one row per line"
        )
    yield from _read_json_lines(path, name, on_read, column)


def _first_text(file: IO[str]) -> str:
    """Return the rest of the first nonblank chunk and one more chunk, which ends the first line or
    makes it longer than a single character."""
    chunks = iter(partial(file.read, CHUNK_SIZE), "")
    start = next(filter(None, map(str.lstrip, chunks)), "")
    return start + next(chunks, "")


def _pieces(file: IO[AnyStr], path: Path, remedy: str) -> Iterator[AnyStr]:
    """Yield the content of a file that is read as a whole. Raise `UserError` if it exceeds
    `MAX_WHOLE_SIZE`."""
    size = 0
    while piece := file.read(CHUNK_SIZE):
        size += len(piece)
        if size > MAX_WHOLE_SIZE:
            raise UserError(
                f"{path} has more than {MAX_WHOLE_SIZE:,} characters or bytes; {remedy}"
            )
        yield piece


def _read_tar(path: Path, name: str, on_read: OnRead, column: str | None) -> Iterator[Row]:
    """Read the samples of a WebDataset."""
    with _open_bytes(path, on_read) as file:
        offset = 0
        try:
            with tarfile.open(fileobj=file, mode="r|", tarinfo=Member) as archive:
                for row in sample_rows(archive, name, media=column is None):
                    yield row
                    offset = archive.offset
                _check_end(archive)
        except tarfile.TarError as error:
            raise UserError(
                f"{path} is not a readable tar file: {error}, after offset {offset:,}"
            ) from None


def _check_end(archive: tarfile.TarFile) -> None:
    """Read the empty blocks after an archive. Raise `tarfile.ReadError` if they have content:
    tarfile ends at the first empty block, also if it is a member that was overwritten."""
    rest = archive.fileobj
    assert rest is not None, "opened from a file"
    while chunk := rest.read(CHUNK_SIZE):
        if chunk.strip(b"\0"):
            raise tarfile.ReadError(
                "content follows empty blocks, which end an archive; they are damage, or several "
                "archives are in one file"
            )


def _read_csv(path: Path, name: str, on_read: OnRead, column: str | None) -> Iterator[Row]:
    # the default of 131,072 characters is less than a long document
    csv.field_size_limit(MAX_ROW_CHARACTERS)
    with _open_text(path, on_read, newline="") as file:
        reader = csv.reader(_without_nul(numbered_lines(file, path), path), strict=True)
        columns: list[str] = []
        try:
            for line, cells in _csv_lines(reader):
                where = f"{name}:{line}"
                if not cells:
                    yield Row(where, None)
                elif not columns:
                    columns = cells
                    _check_header(columns, f"{path}:{line}")
                elif len(cells) == len(columns):
                    yield Row(where, dict(zip(columns, cells, strict=True)))
                else:
                    yield Row(where, None, f"{len(cells)} cells for {len(columns)} columns")
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num}: broken CSV, {error}") from None


def _without_nul(lines: Iterable[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        _check_nul(line, path, number)
        yield line


def _csv_lines(reader: "Reader") -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a `csv.reader`, each with the number of its first line."""
    first = 1
    for cells in reader:
        yield first, cells
        first = reader.line_num + 1


def _check_header(columns: Sequence[str], where: str) -> None:
    _check_names(columns, where)
    if len(columns) == 1 and (other := next((mark for mark in ";\t" if mark in columns[0]), None)):
        raise UserError(
            f"{where}: the only column is {columns[0]!r}; separate columns by commas, not {other!r}"
        )


def _check_names(columns: Sequence[str], where: str) -> None:
    counts = Counter(filter(str.strip, columns))
    if repeated := [column for column, count in counts.items() if count > 1]:
        raise UserError(f"{where}: the column name {repeated[0]!r} is repeated; rename one column")


def _read_parquet(path: Path, name: str, on_read: OnRead, column: str | None) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    source: object = path
    if path.suffix.lower() in COMPRESSIONS:  # as a whole, because reading begins at the end
        with _open_bytes(path, _ignore_progress) as content:
            remedy = "decompress it (parquet has its own compression)"
            source = pyarrow.BufferReader(b"".join(_pieces(content, path, remedy)))
    try:
        file = parquet.ParquetFile(source, page_checksum_verification=True)
        _check_names(file.schema_arrow.names, str(path))
        if column is not None:
            check_column(file.schema_arrow.names, column, str(path))
        n_read = 0
        n_rows = file.metadata.num_rows
        size = path.stat().st_size
        for batch in file.iter_batches(
            batch_size=1024, columns=None if column is None else [column]
        ):
            yield from arrow_rows(batch, name, n_read + 1)
            n_read += len(batch)
            on_read(size * len(batch) // max(n_read, n_rows))
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"{path} is not a readable parquet file: {first_line(error)}") from None
    if n_read != n_rows:
        raise UserError(
            f"{path} is not a readable parquet file: it has {n_read:,} rows instead of {n_rows:,}"
        )


_TEXT_FORMATS = (".txt", ".md")
_READERS: dict[str, Callable[[Path, str, OnRead, str | None], Iterator[Row]]] = {
    **dict.fromkeys(_TEXT_FORMATS, _read_text),
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".tar": _read_tar,
}

"""File formats: a local file in, its rows or its documents out.

Each row of a table and each whole text file is one. Whatever is wrong with a file is a `UserError` that names the file
and the place in it; what is wrong with a single row of it is the row's own.
"""

import codecs
import csv
import io
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torchtitan.components.data.json_list import LONGEST, in_words, list_elements
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    import pyarrow

Document = Iterable[str]
"""The text of one document, in as many chunks as suits its reader. An empty one keeps its number and is skipped."""

OnRead = Callable[[int], None]
"""Told how many further bytes of the file have been read, for a progress bar."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table."""

    number: int
    """From 1 in its file; in one with a row per line, that of the line."""
    where: str
    """`my.jsonl:17`, of a CSV file the line that the row begins in, or `a.parquet, row 3`."""
    values: dict[str, Any] | None
    """The cells by column; None: there are none."""
    error: str = ""
    """Why there are none; a blank line has neither cells nor an error."""


COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
CHUNK_SIZE = 1 << 20
"""Characters of a text file read at a time."""

_MOST_UNPACKED = 4 << 30
"""Bytes of a parquet file that was compressed as a whole, all of which are in memory."""


def file_format(path: Path) -> str | None:
    """The file's extension without a compression's, if there is a reader for it: `.jsonl` for `a.jsonl.zst`."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    suffix = name.suffix.lower()
    return suffix if suffix in _READERS else None


def supported_formats() -> str:
    """The extensions that can be read, for a message."""
    return f"{', '.join(suffix[1:] for suffix in _READERS)}, each also as {' or '.join(COMPRESSIONS)}"


def regular_file(path: Path) -> Path:
    """Return a path that exists; raises `UserError` for a link to nothing, and for a pipe, a socket or a device, which
    must not be opened: that may wait forever."""
    if path.is_file():
        return path
    if path.exists():
        raise UserError(f"{path} is not a regular file; save its content in one, or move it elsewhere")
    raise UserError(f"{path} is a link to {os.readlink(path)}, which does not exist; mend the link, or remove it")


def read_rows(path: Path, name: str, on_read: OnRead, column: str | None = None) -> Iterator[Row]:
    """The rows of a file in their order; a text file is one row, with the column `text`.

    Args:
        path: the file, of a known format.
        name: what the rows' places call it.
        on_read: see `OnRead`.
        column: the only one that is wanted; the others may be left out.

    Raises:
        UserError: the file cannot be opened, decompressed, decoded or parsed as a whole, or lacks the `column`.
    """
    suffix = file_format(path)
    assert suffix is not None, path
    with _named_errors(path):
        yield from _READERS[suffix](path, name, on_read, column)


def read_documents(path: Path, text_column: str, on_read: OnRead) -> Iterator[Document]:
    """The documents of a file in their order; the n-th is the file's n-th row, or line of a `.jsonl`.

    A document must be read before the next is asked for.

    Raises:
        UserError: the file cannot be opened, decompressed, decoded or parsed, or `text_column` is not in it.
    """
    if file_format(path) in _TEXT_FORMATS:
        yield _text_chunks(path, on_read)
        return
    for row in read_rows(path, str(path), on_read, text_column):
        yield text_of(row, text_column)


class _CountedFile(io.FileIO):
    """A file that tells how much of it has been read."""

    def __init__(self, path: Path, on_read: OnRead):
        super().__init__(path)
        self.on_read = on_read

    def readinto(self, buffer: Any) -> int | None:
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
        raise UserError(f"{path} cannot be read: {error.strerror or first_line(error)}") from error


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


def _text_chunks(path: Path, on_read: OnRead) -> Iterator[str]:
    # Its own error handling: the chunks are read by whoever takes the document, after `read_documents` has yielded.
    line = 1
    with _named_errors(path), _open_text(path, on_read) as file:
        while chunk := file.read(CHUNK_SIZE):
            _check_nul(chunk, path, line)
            yield chunk
            line += chunk.count("\n")


def _check_nul(text: str, path: Path, line: int) -> None:
    if "\0" in text:
        line += text.count("\n", 0, text.index("\0"))
        raise UserError(
            f"{path}:{line}: a NUL character, as in a damaged file or in UTF-16; mend or convert it, or leave it out"
        )


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(iter(partial(file.readline, LONGEST), ""), 1):
        if len(line) == LONGEST:
            raise UserError(
                f"{path}:{number}: the line has more than {LONGEST:,} characters; split it, or leave it out"
            )
        yield line


def _read_text(path: Path, name: str, on_read: OnRead, column: str | None) -> Iterator[Row]:
    yield Row(1, name, {"text": "".join(_text_chunks(path, on_read))})


def _read_json_lines(path: Path, name: str, on_read: OnRead, column: str | None) -> Iterator[Row]:
    with _open_text(path, on_read) as file:
        yield from _json_rows(name, _lines(file, path), 1)


def _json_rows(name: str, lines: Iterable[str], first_line: int) -> Iterator[Row]:
    for number, line in enumerate(lines, first_line):
        where = f"{name}:{number}"
        if not line.strip():
            yield Row(number, where, None)
            continue
        try:
            yield _object_row(number, where, parse_json(line))
        except ValueError as error:
            yield Row(number, where, None, f"broken JSON, {in_words(error)}")


def _object_row(number: int, where: str, value: Any) -> Row:
    if isinstance(value, dict):
        return Row(number, where, value)
    return Row(number, where, None, f"expected an object with columns as its keys, found {kind_of(value)}")


def _read_json(path: Path, name: str, on_read: OnRead, column: str | None) -> Iterator[Row]:
    """A list of rows; or one row per line, as much of what is called `.json` in fact is."""
    is_list = _begins_list(path)
    with _open_text(path, on_read) as file:
        if is_list:
            for number, (value, text) in enumerate(list_elements(file, path, CHUNK_SIZE), 1):
                yield _element_row(number, f"{name}, element {number}", value, text)
            return
        lines = _lines(file, path)
        first, line = next(((n, line) for n, line in enumerate(lines, 1) if not line.isspace()), (0, ""))
        if line.strip() == "{":
            raise UserError(
                f"{path}:{first}: one object over several lines; it must be a list of rows, or a row per line"
            )
        yield from _json_rows(name, itertools.chain([line], lines), first)


def _begins_list(path: Path) -> bool:
    with _open_text(path, lambda _: None) as file:
        characters = iter(partial(file.read, 1), "")
        return next((character for character in characters if not character.isspace()), "") == "["


def _element_row(number: int, where: str, value: Any, text: str) -> Row:
    try:
        _check_characters(value, text)
    except ValueError as error:
        return Row(number, where, None, f"broken JSON, {in_words(error)}")
    return _object_row(number, where, value)


def parse_json(text: str) -> Any:
    """Return what JSON text says; raises `ValueError` if it is none, or has strings in it that are no text."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(in_words(error)) from None
    _check_characters(value, text)
    return value


def _check_characters(value: Any, text: str) -> None:
    """Raise `ValueError` for half of a pair of surrogates, which JSON can spell, but which has no UTF-8 form and cannot
    be tokenized."""
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half of a character, {error.object[error.start]!r}") from None
        except RecursionError as error:
            raise ValueError(in_words(error)) from None


def _read_csv(path: Path, name: str, on_read: OnRead, column: str | None) -> Iterator[Row]:
    csv.field_size_limit(LONGEST)  # the default of 131,072 characters is less than a long document
    with _open_text(path, on_read, newline="") as file:
        reader = csv.reader(_without_nul(_lines(file, path), path), strict=True)
        try:
            rows = _csv_lines(reader)
            first, columns = next(rows, (1, []))
            _check_header(columns, f"{path}:{first}")
            for number, (line, cells) in enumerate(rows, 1):
                where = f"{name}:{line}"
                if len(cells) == len(columns):
                    yield Row(number, where, dict(zip(columns, cells, strict=True)))
                else:
                    differ = "more" if len(cells) > len(columns) else "fewer"
                    yield Row(number, where, None, f"{differ} cells than the {len(columns)} columns")
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num}: broken CSV, {error}") from None


def _without_nul(lines: Iterable[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        _check_nul(line, path, number)
        yield line


def _csv_lines(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """What a `csv.reader` reads, without blank lines, each with the number of the line that it begins in."""
    first = 1
    for cells in reader:
        if cells:
            yield first, cells
        first = reader.line_num + 1


def check_names(columns: Sequence[str], where: str) -> None:
    """Raise `UserError` for columns of the same name."""
    named = Counter(filter(str.strip, columns))
    if twice := [column for column, count in named.items() if count > 1]:
        raise UserError(f"{where}: several columns are called {twice[0]!r}; rename one of them")


def _check_header(columns: Sequence[str], where: str) -> None:
    check_names(columns, where)
    if len(columns) == 1 and (other := next((mark for mark in ";\t" if mark in columns[0]), None)):
        raise UserError(
            f"{where}: the only column is {columns[0]!r}; columns must be separated by commas, not {other!r}"
        )


def _read_parquet(path: Path, name: str, on_read: OnRead, column: str | None) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    source = pyarrow.BufferReader(_unpacked(path)) if path.suffix.lower() in COMPRESSIONS else path
    try:
        file = parquet.ParquetFile(source, page_checksum_verification=True)
        check_names(file.schema_arrow.names, str(path))
        if column is not None:
            check_column(file.schema_arrow.names, column, str(path))
        n_read, n_rows, size = 0, file.metadata.num_rows, path.stat().st_size
        for batch in file.iter_batches(batch_size=1024, columns=None if column is None else [column]):
            yield from arrow_rows(batch, name, n_read + 1)
            n_read += len(batch)
            on_read(size * len(batch) // max(n_read, n_rows))
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"{path} is not a readable parquet file: {first_line(error)}") from None
    if n_read != n_rows:
        raise UserError(f"{path} is not a readable parquet file: it has {n_read:,} rows, and should have {n_rows:,}")


def _unpacked(path: Path) -> bytearray:
    """Return all of a compressed parquet file, which is read from its end and so has to be in memory."""
    content = bytearray()
    with _open_bytes(path, lambda _: None) as file:
        while piece := file.read(CHUNK_SIZE):
            content += piece
            if len(content) > _MOST_UNPACKED:
                most = f"{_MOST_UNPACKED:,} bytes"
                raise UserError(f"{path} unpacks to more than {most}; store it unpacked, parquet compresses by itself")
    return content


def first_line(error: Exception) -> str:
    """Return the first line of an error of a library, for a message; its type if it says nothing."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def arrow_rows(batch: "pyarrow.RecordBatch | pyarrow.Table", name: str, first: int) -> Iterator[Row]:
    """Yield the rows of an Arrow batch, numbered from `first`. One with a value that Python has no form for, such as a
    time after the year 9999 or text that is not UTF-8, is a row with an error."""
    try:
        cells = batch.to_pylist()
    except Exception as error:  # of many types, by the type of the column
        if len(batch) == 1:
            yield Row(first, f"{name}, row {first}", None, f"a cell that cannot be read, {first_line(error)}")
            return
        for index in range(len(batch)):
            yield from arrow_rows(batch.slice(index, 1), name, first + index)
        return
    for number, values in enumerate(cells, first):
        yield Row(number, f"{name}, row {number}", without_filled_in(values, batch.schema))


def without_filled_in(values: dict[str, Any], schema: "pyarrow.Schema") -> dict[str, Any]:
    """A row of an Arrow table without the nulls inside its cells: there, an object has the keys of all others too."""
    return {field.name: _without_nulls(values[field.name], field.type) for field in schema}


def _without_nulls(value: Any, kind: "pyarrow.DataType") -> Any:
    from pyarrow import types

    if value is None:
        return None
    if types.is_struct(kind):
        return {f.name: _without_nulls(value[f.name], f.type) for f in kind if value[f.name] is not None}
    if types.is_list(kind) or types.is_large_list(kind):
        return [_without_nulls(item, kind.value_type) for item in value]
    return value


_TEXT_FORMATS = (".txt", ".md")
_READERS: dict[str, Callable[[Path, str, OnRead, str | None], Iterator[Row]]] = {
    **dict.fromkeys(_TEXT_FORMATS, _read_text),
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def kind_of(value: Any) -> str:
    """The type of a value, for a message: `a str`, `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def text_of(row: Row, text_column: str) -> Document:
    """The text in a row as a document; raises `UserError` if there is none."""
    if row.values is None:
        if row.error:
            raise UserError(f"{row.where}: {row.error}")
        return ()
    check_column(list(row.values), text_column, row.where)
    return (check_text(row.values[text_column], text_column, row.where),)


def check_column(columns: list[str], text_column: str, where: str) -> None:
    """Raise `UserError` unless `text_column` is one of the columns."""
    if text_column not in columns:
        raise UserError(
            f"{where}: no column {text_column!r}; set --dataloader.text_column to one of: {', '.join(columns)}"
        )


def check_text(value: Any, text_column: str, where: str) -> str:
    """A cell's text, empty for a null; raises `UserError` for anything else."""
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: column {text_column!r} holds {kind_of(value)}, not text")
    return value or ""

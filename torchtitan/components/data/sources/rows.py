"""Parts of a source, which yield rows or documents, and rows from JSON: one per line, or the elements of a list."""

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from torchtitan.tools.errors import UserError

LONGEST = 1 << 28
"""Most characters of a row. A longer row means that the file is broken, and memory would run out before its end."""

Document = Iterable[str]
"""Text of one document, in chunks of any size. An empty document keeps its number and is skipped."""

OnRead = Callable[[int], None]
"""Progress callback: receives the number of further bytes of a file, or rows of a table, that have been read."""

_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table."""

    where: str
    """Location: `my.jsonl:17` (in CSV, the row's first line) or `a.parquet, row 3`."""
    values: dict[str, Any] | None
    """Cells by column; None: no cells."""
    error: str = ""
    """Reason for missing cells; empty for a blank line."""


class Part(ABC):
    """A named piece of a source: a file or a split.

    Args:
        name: name in messages and in the locations of rows.
        text_column: column with the text of documents.
    """

    kind = ""
    """Distinguishes parts with the same content that are read in different ways."""

    def __init__(self, name: str, text_column: str = "text"):
        self.name = name
        self.text_column = text_column

    @abstractmethod
    def size(self) -> int:
        """Return the total that `on_read` adds up to: bytes or rows."""

    @abstractmethod
    def contents(self, digest: Callable[[Path], str]) -> list[str]:
        """Return the part's identity: equal lists mean equal rows. `digest` returns the digest of a file's content."""

    @abstractmethod
    def rows(self, on_read: OnRead) -> Iterator[Row]:
        """Yield the rows in order; raises `UserError` for an unreadable file."""

    @abstractmethod
    def documents(self, on_read: OnRead) -> Iterator[Document]:
        """Yield the documents in order, each to be read before the next; raises `UserError` if one cannot be read."""


def text_of(row: Row, text_column: str) -> Document:
    """Return a row's text as a document; raises `UserError` if there is none."""
    if row.values is None:
        if row.error:
            raise UserError(f"{row.where}: {row.error}")
        return ()
    check_column(list(row.values), text_column, row.where)
    return (check_text(row.values[text_column], text_column, row.where),)


def check_column(columns: Sequence[str], text_column: str, where: str) -> None:
    if text_column not in columns:
        raise UserError(
            f"{where}: no column {text_column!r}; set --dataloader.text_column to one of: {', '.join(columns)}"
        )


def check_text(value: Any, text_column: str, where: str) -> str:
    """Return a cell's text, empty for a null; raises `UserError` for other types."""
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: column {text_column!r} holds {kind_of(value)}, not text")
    return value or ""


def regular_file(path: Path) -> Path:
    """Return an existing path; raises `UserError` for a broken link, pipe, socket or device, which may block on
    opening."""
    if path.is_file():
        return path
    if path.exists():
        raise UserError(f"{path} is not a regular file; save its content in one, or move it elsewhere")
    raise UserError(f"{path} is a link to {path.readlink()}, which does not exist; mend the link, or remove it")


def kind_of(value: Any) -> str:
    """Return a value's type for a message: `a str`, `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def first_line(error: Exception) -> str:
    """Return the first line of a library's error, or its type if there is no message."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def parse_json(text: str) -> Any:
    """Return the value of JSON text; raises `ValueError` in words if it is invalid, too deep, or not Unicode."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(_in_words(error)) from None
    _check_characters(value, text)
    return value


def json_rows(name: str, lines: Iterable[str], first_line: int = 1) -> Iterator[Row]:
    """Yield the rows of lines with one JSON object each; a blank line is a row without values.

    Args:
        name: file name in the rows' locations.
        lines: lines of the file.
        first_line: number of the first line, from 1.
    """
    for number, line in enumerate(lines, first_line):
        where = f"{name}:{number}"
        if not line.strip():
            yield Row(where, None)
            continue
        try:
            yield _object_row(where, parse_json(line))
        except ValueError as error:
            yield Row(where, None, f"broken JSON, {_in_words(error)}")


def numbered_lines(file: IO[str], path: Path) -> Iterator[str]:
    """Yield the lines of a file; raises `UserError` for a line of more than `LONGEST` characters."""
    for number, line in enumerate(iter(partial(file.readline, LONGEST), ""), 1):
        if len(line) == LONGEST:
            raise UserError(
                f"{path}:{number}: the line has more than {LONGEST:,} characters; split it, or leave it out"
            )
        yield line


def read_json(file: IO[str], path: Path, name: str, *, is_list: bool, chunk_size: int) -> Iterator[Row]:
    """Yield the rows of a `.json` file, a list of objects or one object per line, reading a list no further than
    needed.

    Args:
        file: at its beginning.
        path: file name in messages about the whole file.
        name: file name in the rows' locations.
        is_list: whether the first non-space character is a bracket.
        chunk_size: fewest characters of a list to read at a time.

    Raises:
        UserError: the list is broken, with the line, or the file is a single object.
    """
    if is_list:
        for number, (value, text) in enumerate(_list_elements(file, path, chunk_size), 1):
            where = f"{name}, element {number}"
            try:
                _check_characters(value, text)
            except ValueError as error:
                yield Row(where, None, f"broken JSON, {error}")
            else:
                yield _object_row(where, value)
        return
    lines = numbered_lines(file, path)
    first, line = next(((n, line) for n, line in enumerate(lines, 1) if not line.isspace()), (0, ""))
    if line.strip() == "{":
        raise UserError(f"{path}:{first}: one object over several lines; it must be a list of rows, or a row per line")
    yield from json_rows(name, itertools.chain([line], lines), first)


def _object_row(where: str, value: Any) -> Row:
    if isinstance(value, dict):
        return Row(where, value)
    return Row(where, None, f"expected an object with columns as its keys, found {kind_of(value)}")


def _check_characters(value: Any, text: str) -> None:
    """Raise `ValueError` for a lone surrogate, which JSON can spell but UTF-8 cannot encode."""
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half of a character, {error.object[error.start]!r}") from None
        except RecursionError as error:
            raise ValueError(_in_words(error)) from None


def _in_words(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (column {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]


def _list_elements(file: IO[str], path: Path, chunk_size: int) -> Iterator[tuple[Any, str]]:
    """Yield the elements of a file's list, each with its source text."""
    text = ""
    while not text.strip():
        text += file.read(chunk_size)
    start, line = len(text) - len(text.lstrip()), 1  # `line`: number of the first line of `text`

    def broken(why: str) -> UserError:
        begin = _after_blanks(text, start + 1)
        return UserError(f"{path}:{line + text.count(chr(10), 0, begin)}: broken JSON, {why}")

    while True:
        try:
            element, stop = _element(text, start)
        except json.JSONDecodeError as error:
            if not (more := file.read(max(chunk_size, len(text) - start))):
                raise UserError(f"{path}:{line + error.lineno - 1}: broken JSON, {error.msg}") from None
            if len(text) - start > LONGEST:
                raise broken(f"an element has more than {LONGEST:,} characters") from None
            line += text.count("\n", 0, start)
            text, start = text[start:] + more, 0
            continue
        except (ValueError, RecursionError) as error:
            raise broken(_in_words(error)) from None
        if element is not None:
            yield element
        if text[stop] == "]":
            break
        start = stop
    rest = text[stop + 1 :]
    while not rest.strip():
        if not (rest := file.read(chunk_size)):
            return
    raise UserError(f"{path}: broken JSON, there is more behind the list: {rest.strip()[:40]!r}")


def _element(text: str, start: int) -> tuple[tuple[Any, str] | None, int]:
    """Return the element after the bracket or comma at `start` with its source text (None for an empty list), and the
    index of the comma or bracket after it. Raises `ValueError` if there is no complete element."""
    begin = _after_blanks(text, start + 1)
    if text[start] == "[" and text[begin : begin + 1] == "]":
        return None, begin
    value, end = _DECODER.raw_decode(text, begin)
    stop = _after_blanks(text, end)
    if text[stop : stop + 1] not in (",", "]"):
        raise json.JSONDecodeError("Expecting ',' delimiter", text, stop)
    return (value, text[begin:end]), stop


def _after_blanks(text: str, start: int) -> int:
    while text[start : start + 1] in (" ", "\n", "\r", "\t"):
        start += 1
    return start

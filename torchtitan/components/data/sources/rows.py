"""Parts of a source, which yield rows or documents, and rows from JSON: one per line, or the
elements of a list."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from torchtitan.tools.errors import UserError
from torchtitan.tools.redact import redact

MAX_ROW_CHARACTERS = 1 << 28
"""Maximum characters of a row. Longer rows indicate a broken file and would exhaust memory."""

MAX_BLANK_ROWS = 100_000
MAX_BLANK_CHARACTERS = 1 << 20
BLANKS_PER_CONTENT = 100
"""Maximum blank rows, and blank characters of long text, in a file; each other row or character
adds the last number. A few kB of compressed data can hold millions of blank lines, which take
minutes to read and tokenize."""

T = TypeVar("T")

_LONG_TEXT = 1 << 16
_BLANKS = " \t\r\n"

Document = Iterable[str]
"""Text of one document in chunks of any size. Empty documents are numbered but skipped."""

OnRead = Callable[[int], None]
"""Progress callback, called with the number of bytes of a file or rows of a table read since the
last call."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table."""

    where: str
    """Location: `my.jsonl:17` (for CSV, the first line of the row) or `a.parquet, row 3`."""
    values: dict[str, object] | None
    """Cells by column; None: no cells."""
    error: str = ""
    """Reason for missing cells; empty for a blank line."""


class Part(ABC):
    """A named piece of a source: a file or a split.

    Args:
        name: name in messages and in the locations of rows; its credentials are removed.
        text_column: column with the text of documents.
    """

    kind = ""
    """Distinguishes parts with equal content that are read differently."""

    counts_bytes = True
    """False if `size` counts rows."""

    folder: Path | None = None
    """Folder to which paths in rows are relative; None if the data is in no local folder."""

    def __init__(self, name: str, text_column: str = "text"):
        self.name = redact(name)
        self.text_column = text_column

    @abstractmethod
    def size(self) -> int:
        """Return the sum of all `on_read` calls: bytes or rows, see `counts_bytes`."""

    def n_bytes(self) -> int:
        """Return the bytes of the data as it is stored."""
        assert self.counts_bytes, "a part that counts rows has its own"
        return self.size()

    @abstractmethod
    def contents(self, digest: Callable[[Path], str]) -> list[str]:
        """Return the identity of the rows: equal lists mean equal rows. `digest` hashes the content
        of a file."""

    @abstractmethod
    def rows(self, on_read: OnRead) -> Iterator[Row]:
        """Yield the rows in order. Raise `UserError` for an unreadable file."""

    @abstractmethod
    def documents(self, on_read: OnRead) -> Iterator[Document]:
        """Yield the documents in order; consume each before the next. Raise `UserError` for
        unreadable data."""


def evenly(items: Iterable[T], share: float) -> Iterator[T]:
    """Yield a share of the items, from 0 to 1, evenly spaced."""
    due = 0.0
    for item in items:
        due += share
        if due >= 1 - 1e-9:
            due -= 1
            yield item


def text_of(row: Row, text_column: str) -> Document:
    """Return a row's text as a document. Raise `UserError` if it has no text."""
    if row.values is None:
        if row.error:
            raise UserError(f"{row.where}: {row.error}")
        return ()
    check_column(list(row.values), text_column, row.where)
    return (check_text(row.values[text_column], text_column, row.where),)


_CONVERSATIONS = {"messages", "conversations", "instruction", "prompt", "chosen"}
"""Columns of data for fine-tuning."""


def check_column(columns: Sequence[str], text_column: str, where: str) -> None:
    if text_column not in columns:
        remedy = (
            f"set --dataloader.text_column to one of: {', '.join(columns)}"
            if columns
            else "the row has no columns"
        )
        if _CONVERSATIONS & set(columns):
            remedy += "; to train on conversations, use a configuration such as --config sft"
        raise UserError(f"{where}: no column {text_column!r}; {remedy}")


def check_text(value: object, text_column: str, where: str) -> str:
    """Return a cell's text, empty for null. Raise `UserError` for other types."""
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: column {text_column!r} contains {kind_of(value)}, not text")
    return value or ""


def kind_of(value: object) -> str:
    """Describe a value's type for an error message: `a str`, `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def first_line(error: Exception) -> str:
    """Return the first line of an error message, or the error's type without a message."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def parse_json(text: str) -> object:
    """Parse JSON. Raise `ValueError` with a readable message if the text is invalid, nested too
    deeply, or not valid Unicode."""
    try:
        value = json.loads(text)
        if _may_have_surrogates(text):
            _check_characters(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(_describe_error(error)) from None
    return value


class BlankLimit:
    """Counts blank parts of a file. Too many of them raise a `UserError` with the place.

    Args:
        noun: the counted parts, in plural.
        maximum: see `MAX_BLANK_ROWS`.
    """

    def __init__(self, noun: str, maximum: int):
        self._noun = noun
        self._allowed = maximum
        self._n_blank = 0

    def count(self, n_blank: int, n_others: int, where: str) -> None:
        self._n_blank += n_blank
        self._allowed += n_others * BLANKS_PER_CONTENT
        if self._n_blank > self._allowed:
            raise UserError(
                f"{where}: found more than {self._allowed:,} blank {self._noun} up to here; the "
                f"file may be damaged; remove blank {self._noun}"
            )

    def count_text(self, text: str, where: str) -> None:
        n_blank = sum(map(text.count, _BLANKS))
        self.count(n_blank, len(text) - n_blank, where)


def with_bounded_blanks(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows. Raise `UserError` for a file with too many blank rows, which have no cells or
    only empty ones, or too many blank characters in long cells."""
    of_rows = BlankLimit("rows", MAX_BLANK_ROWS)
    of_text = BlankLimit("characters", MAX_BLANK_CHARACTERS)
    for row in rows:
        cells = (row.values or {}).values()
        is_blank = not row.error and not any(cells)
        of_rows.count(is_blank, not is_blank, row.where)
        for cell in cells:
            if isinstance(cell, str) and len(cell) > _LONG_TEXT:
                of_text.count_text(cell, row.where)
        yield row


def json_rows(name: str, lines: Iterable[str]) -> Iterator[Row]:
    """Yield one row per line with a JSON object; blank lines are rows without values. `name` is the
    file's in the rows' locations."""
    for number, line in enumerate(lines, 1):
        where = f"{name}:{number}"
        if not line.strip():
            yield Row(where, None)
            continue
        try:
            yield object_row(where, parse_json(line))
        except ValueError as error:
            yield Row(where, None, f"broken JSON, {error}")


def numbered_lines(file: IO[str], path: Path) -> Iterator[str]:
    """Yield the lines of a file. Raise `UserError` for a line of more than `MAX_ROW_CHARACTERS`
    characters."""
    for number, line in enumerate(iter(partial(file.readline, MAX_ROW_CHARACTERS), ""), 1):
        if len(line) == MAX_ROW_CHARACTERS:
            raise UserError(
                f"{path}:{number}: the line has more than {MAX_ROW_CHARACTERS:,} characters; split "
                "or remove it"
            )
        yield line


def json_elements(name: str, text: str, path: Path) -> Iterator[Row]:
    """Yield the elements of a list of objects. Raise `UserError` with the line in the file if it is
    not valid JSON.

    Args:
        name: file name in the rows' locations.
        text: content of the file.
        path: path for error messages.
    """
    try:
        elements = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(
            f"{path}{line}: broken JSON, {_describe_error(error)}; correct the file"
        ) from None
    is_checked = _may_have_surrogates(text)
    for number, value in enumerate(elements, 1):
        where = f"{name}, element {number}"
        try:
            if is_checked:
                _check_characters(value)
        except (ValueError, RecursionError) as error:
            yield Row(where, None, f"broken JSON, {_describe_error(error)}")
        else:
            yield object_row(where, value)


def object_row(where: str, value: object) -> Row:
    """Return the row of a JSON object, or an error for another value."""
    if isinstance(value, dict):
        return Row(where, value)
    return Row(where, None, f"expected an object with columns as its keys, found {kind_of(value)}")


def _may_have_surrogates(text: str) -> bool:
    """Return whether JSON text has the escape of a surrogate, of a pair or alone."""
    return "\\ud" in text or "\\uD" in text


def _check_characters(value: object) -> None:
    """Raise `ValueError` for a lone surrogate, which JSON allows but UTF-8 cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"lone surrogate {error.object[error.start]!r}") from None


def _describe_error(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (column {error.colno})"
    return (
        "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
    )

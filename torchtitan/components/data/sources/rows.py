"""What every source gives, parts of rows or documents; and rows from JSON: a line each, or the elements of a list."""

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
"""Characters of a row. In a file that has more of them without an end to the row, something is broken, and memory would
run out before it ends."""

Document = Iterable[str]
"""The text of one document, in as many chunks as suits its reader. An empty one keeps its number and is skipped."""

OnRead = Callable[[int], None]
"""Told how many further bytes of a file, or rows of a table, have been read, for a progress bar."""

_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table."""

    where: str
    """`my.jsonl:17`, of a CSV file the line that the row begins in, or `a.parquet, row 3`."""
    values: dict[str, Any] | None
    """The cells by column; None: there are none."""
    error: str = ""
    """Why there are none; a blank line has neither cells nor an error."""


class Part(ABC):
    """A named piece of a source: a file, or a split.

    Args:
        name: what messages call it, also in the places of its rows.
        text_column: the column of its documents' text.
    """

    kind = ""
    """Tells parts of the same content that are read in different ways."""

    def __init__(self, name: str, text_column: str = "text"):
        self.name = name
        self.text_column = text_column

    @abstractmethod
    def size(self) -> int:
        """What `on_read` adds up to when all has been read: bytes or rows."""

    @abstractmethod
    def contents(self, digest: Callable[[Path], str]) -> list[str]:
        """What the part is made of: equal lists mean equal rows. `digest` is that of a file's content."""

    @abstractmethod
    def rows(self, on_read: OnRead) -> Iterator[Row]:
        """The rows in their order; raises `UserError` for a file that cannot be read."""

    @abstractmethod
    def documents(self, on_read: OnRead) -> Iterator[Document]:
        """The documents in their order, each to be read before the next is asked for; raises `UserError` for what
        cannot be read, or has no text."""


def text_of(row: Row, text_column: str) -> Document:
    """The text in a row as a document; raises `UserError` if there is none."""
    if row.values is None:
        if row.error:
            raise UserError(f"{row.where}: {row.error}")
        return ()
    check_column(list(row.values), text_column, row.where)
    return (check_text(row.values[text_column], text_column, row.where),)


def check_column(columns: Sequence[str], text_column: str, where: str) -> None:
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


def regular_file(path: Path) -> Path:
    """Return a path that exists; raises `UserError` for a link to nothing, and for a pipe, a socket or a device, which
    must not be opened: that may wait forever."""
    if path.is_file():
        return path
    if path.exists():
        raise UserError(f"{path} is not a regular file; save its content in one, or move it elsewhere")
    raise UserError(f"{path} is a link to {path.readlink()}, which does not exist; mend the link, or remove it")


def kind_of(value: Any) -> str:
    """The type of a value, for a message: `a str`, `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def first_line(error: Exception) -> str:
    """The first line of a library's error, for a message; its type if it says nothing."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def parse_json(text: str) -> Any:
    """The value that JSON text spells; raises `ValueError`, in words, if it is none, is nested too deeply, or has
    strings that are no text."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(_in_words(error)) from None
    _check_characters(value, text)
    return value


def json_rows(name: str, lines: Iterable[str], first_line: int = 1) -> Iterator[Row]:
    """The rows of lines that each hold an object; a blank line is a row without values.

    Args:
        name: what the rows' places call the file.
        lines: from the line number `first_line` on.
        first_line: counted from 1.
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
    """The lines of a file; raises `UserError` for one of more than `LONGEST` characters."""
    for number, line in enumerate(iter(partial(file.readline, LONGEST), ""), 1):
        if len(line) == LONGEST:
            raise UserError(
                f"{path}:{number}: the line has more than {LONGEST:,} characters; split it, or leave it out"
            )
        yield line


def read_json(file: IO[str], path: Path, name: str, *, is_list: bool, chunk_size: int) -> Iterator[Row]:
    """The rows of a `.json` file: a list of objects; or one row per line, as much of what is called `.json` in fact is.
    No more of a list is read than the rows that are asked for need.

    Args:
        file: at its beginning.
        path: what messages call a file that is broken as a whole.
        name: what the rows' places call it.
        is_list: whether the first that is in it but white space is a bracket.
        chunk_size: characters of a list read at a time, at least.

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
    """Raise `ValueError` for half of a pair of surrogates, which JSON can spell, but which has no UTF-8 form and cannot
    be tokenized."""
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half of a character, {error.object[error.start]!r}") from None
        except RecursionError as error:
            raise ValueError(_in_words(error)) from None


def _in_words(error: ValueError | RecursionError) -> str:
    """Why JSON text of one line is broken."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (column {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]


def _list_elements(file: IO[str], path: Path, chunk_size: int) -> Iterator[tuple[Any, str]]:
    """The elements of the list that a file is, each also as it is written there."""
    text = ""
    while not text.strip():
        text += file.read(chunk_size)
    start, line = len(text) - len(text.lstrip()), 1  # `line`: the one that `text` begins in

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
    """The element of a list behind the bracket or comma at `start`, also as it is written, or None of an empty list;
    and where the comma or bracket behind it is. Raises `ValueError` where there is none, or not yet."""
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

"""A JSON list element by element, without the whole of it in memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from torchtitan.tools.errors import UserError

LONGEST = 1 << 28
"""Characters of a row. In a file that has more of them without an end to the row, something is broken, and memory would
run out before it ends."""

_DECODER = json.JSONDecoder()


def list_elements(file: IO[str], path: Path, chunk_size: int) -> Iterator[tuple[Any, str]]:
    """The elements of the list that a file is, each also as it is written there; no more of the file is read than those
    that are asked for need.

    Args:
        file: at its beginning; the first that is in it but white space is a bracket.
        path: what messages call it.
        chunk_size: characters read at a time, at least.

    Raises:
        UserError: it is broken; the message says in which line.
    """
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
            raise broken(in_words(error)) from None
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


def in_words(error: ValueError | RecursionError) -> str:
    """Return why JSON text of one line is broken."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (column {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]

"""Reads the small JSON files that lie beside a model."""

import json
import stat
from pathlib import Path
from typing import Any

from torchtitan.tools.errors import UserError
from torchtitan.tools.model_folder import unreadable

_MOST_BYTES = 2**28
"""The vocabulary of the largest tokenizers takes a tenth of it."""

_MOST_LEVELS = 100
"""Python gives up at about a thousand; whoever walks through the content has room left below this."""


def read_object(path: Path) -> dict[str, Any]:
    """The object in the file; empty where nothing has this name.

    Raises:
        UserError: naming the file, where it does not hold a JSON object.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"'{path}' is not a regular file; replace it with one, or remove it")
        if found.st_size > _MOST_BYTES:
            raise UserError(f"'{path}' has {found.st_size:,} bytes, and may have {_MOST_BYTES:,} at most")
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.is_symlink():
            raise UserError(f"'{path}' is a link to '{path.readlink()}', which does not exist") from error
        return {}
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from error
    try:
        content = loads(text, f"'{path}'")
    except UserError as error:
        raise unreadable(path, str(error)) from error
    if not isinstance(content, dict):
        raise UserError(f"'{path}' must hold a JSON object, not {type(content).__name__}")
    return content


def loads(text: str | bytes, where: str) -> Any:
    """The value that `text` spells, whoever wrote it.

    Args:
        text: JSON; bytes are in UTF-8.
        where: what the message calls it.

    Raises:
        UserError: if it is not JSON, or is JSON nested so deeply that it cannot be worked with.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        levels: int = _MOST_LEVELS + 1
    except ValueError as error:  # also bytes that are not UTF-8, and a number of thousands of digits
        raise UserError(f"{where} is not valid JSON: {error}") from error
    else:
        levels = _levels(content)
    if levels > _MOST_LEVELS:
        raise UserError(f"{where} is nested more than {_MOST_LEVELS} levels deep")
    return content


def _levels(content: Any) -> int:
    levels, level = 0, [content]
    while level := [value for value in level if isinstance(value, (dict, list))]:
        levels += 1
        level = [item for value in level for item in (value.values() if isinstance(value, dict) else value)]
    return levels

"""Reads the small JSON files that lie beside a model."""

import json
from pathlib import Path
from typing import Any

from torchtitan.tools.errors import UserError
from torchtitan.tools.model_folder import unreadable


def read_object(path: Path) -> dict[str, Any]:
    """The object in the file; empty where there is no such file.

    Raises:
        UserError: naming the file, where it does not hold a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise unreadable(path, f"'{path}' is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"'{path}' must hold a JSON object, not {type(content).__name__}")
    return content

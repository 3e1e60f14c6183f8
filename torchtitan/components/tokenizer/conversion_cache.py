"""Cache of converted tokenizers, since a conversion with its checks takes seconds."""

from collections.abc import Callable
from pathlib import Path

from torchtitan.tools import durable
from torchtitan.tools.digests import bytes_digest, cache_root
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_regular
from torchtitan.tools.logging import logger

_FOLDER = "tokenizers"

_MOST_BYTES = 2**30
"""Ten times the largest tokenizer.json."""


def cached_conversion(key: str, convert: Callable[[], bytes]) -> bytes:
    """Return the result of `convert`, from the cache folder if it is there.

    Args:
        key: hexadecimal digest of all that the result depends on.
    """
    path = cache_root() / _FOLDER / key
    content = _read(path)
    if content is None:
        content = convert()
        _write(path, content)
    return content


def _read(path: Path) -> bytes | None:
    """Return the content of a file of the cache; None if it is missing, or not as it was
    written."""
    try:
        digest, _, content = read_regular(path, most=_MOST_BYTES).partition(b"\n")
    except (OSError, UserError):
        return None
    return content if digest == bytes_digest(content).encode() else None


def _write(path: Path, content: bytes) -> None:
    try:
        durable.make_folder(path.parent)
        durable.write(path, bytes_digest(content).encode() + b"\n" + content)
    except OSError as error:
        logger.warning(
            f"the converted tokenizer is not kept, so each start converts it again: {error}"
        )

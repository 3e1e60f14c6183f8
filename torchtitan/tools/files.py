"""Reads files that anyone may have written."""

import stat
from pathlib import Path

from torchtitan.tools.errors import UserError


def regular_file(path: Path, name: str | None = None) -> Path:
    """Return `path`, which may be opened: a regular file, a link to one, or nothing at all.

    Args:
        path: what is about to be read or replaced.
        name: what the message calls it, by default the path.

    Raises:
        UserError: for a link to nothing, and for a folder, a pipe, a socket or a device: reading may wait forever.
        OSError: if the file system does not say what it is.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.is_symlink():
            message = f"{name or path} is a link to '{path.readlink()}', which does not exist; mend it, or remove it"
            raise UserError(message) from error
        return path
    if not stat.S_ISREG(mode):
        raise UserError(f"{name or path} is not a regular file; save its content in one, or remove it")
    return path

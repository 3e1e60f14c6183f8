"""Safe reading of untrusted files: regular files, JSON, and model folders."""

import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchtitan.tools.errors import UserError, os_errors_as

DOWNLOADS = Path("assets/hf")
"""Folder of `torchtitan download`, with a subfolder per model."""

MOST_JSON_BYTES = 2**28
"""Ten times the vocabulary of the largest tokenizers."""

_MOST_LINE_BYTES = 2**26
"""More than a line of a run's records has."""

MOST_BROKEN_LINES = 10_000
"""Broken lines after which the rest of a file is not read: it is not a record of a run."""

_MOST_JSON_LEVELS = 100
"""Well below Python's recursion limit of about a thousand."""

_MOST_NAME_BYTES = 255
_MOST_PATH_LENGTH = 1000
"""Limits of file systems: Linux has 255 and 4,096 bytes, macOS 1,024 for a path."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_PAGE = re.compile(r"https?:/{1,2}huggingface\.co/([\w-][\w.-]*/[\w-][\w.-]*)")
"""Address of a model, also as a path, which has one slash."""

_META = re.compile(r"(Meta-)?Llama-\d")
"""Prefix of the names of Meta's models on the Hub."""

_CACHED = ("models--", "datasets--")
"""Starts of the names of repositories' folders in the Hugging Face cache."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
"""Start of Git's placeholder for a file that Git LFS has not fetched."""


def is_url(path: str) -> bool:
    """Return whether `path` is a URL, including file://."""
    return bool(_URL.match(path))


def without_query(url: str) -> str:
    """Return the URL of a file behind HTTP without its query, such as a signature; in other stores,
    `?` is a character of names and patterns."""
    return url.partition("?")[0] if url.startswith(("http://", "https://")) else url


def regular_file(path: Path, name: str | None = None) -> Path:
    """Return `path`, called `name` in messages, if it is a regular file, a link to one, or absent.
    Raise `UserError` for a dangling link, an unknown type, or a folder, pipe, socket or device,
    from which reading may block forever."""
    name = name or str(path)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.is_symlink():
            message = (
                f"{name} is a link to '{path.readlink()}', which does not exist; fix or remove it"
            )
            raise UserError(message) from error
        return path
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise UserError(f"{name} is not a regular file; save its content to a file, or remove it")
    return path


def is_file_name(name: str) -> bool:
    """Return whether a text from a file can be the path of a file: each part has 1 to 255 bytes of
    UTF-8 without NUL, and the last part is not a folder's."""
    try:
        parts = [part.encode() for part in name.split("/")]
    except UnicodeEncodeError:  # half of a surrogate pair, from JSON
        return False
    is_short = (
        all(len(part) <= _MOST_NAME_BYTES for part in parts) and len(name) <= _MOST_PATH_LENGTH
    )
    return is_short and "\0" not in name and parts[-1] not in (b"", b".", b"..")


def open_regular(path: Path, name: str | None = None) -> io.BufferedReader:
    """Open an untrusted file for reading. Raise `UserError` like `regular_file`, also if the file
    is replaced by a pipe or device at the last moment, and `OSError` for an absent file."""
    name = name or str(path)
    regular_file(path, name)
    # opening a pipe does not wait
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{name} is not a regular file; save its content to a file, or remove it")
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, name: str | None = None, most: int = MOST_JSON_BYTES) -> bytes:
    """Return the content of an untrusted file. Raise like `open_regular`, and `UserError` for more
    than `most` bytes."""
    name = name or str(path)
    with open_regular(path, name) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        # A read takes memory for as many bytes as it may return.
        content = file.read(min(most, n_bytes + MOST_JSON_BYTES) + 1) if n_bytes <= most else b""
    if max(n_bytes, len(content)) > most:
        raise UserError(
            f"{name} has {max(n_bytes, len(content)):,} bytes, and may have {most:,} at most"
        )
    return content


def named_file(folder: Path, name: object, by: str) -> Path:
    """Return the path of a file in a folder, named by the untrusted file `by`. Raise `UserError`
    unless it is a regular file whose real path is in the folder, which itself may be a link, or
    absent."""
    if not isinstance(name, str) or not is_plain_path(name):
        raise UserError(
            f"{by} names the file {name!r:.200}, which is not a path inside its folder; write it "
            "again"
        )
    home, path = folder.resolve(), folder / name
    if not path.resolve().is_relative_to(home):
        raise UserError(
            f"{by} names {path}, a link to {path.resolve()} outside the folder; replace it with a "
            "copy"
        )
    return regular_file(path)


def is_plain_path(name: str) -> bool:
    """Return whether the text is a relative path of a file that stays in its folder, see
    `is_file_name`."""
    return is_file_name(name) and not Path(name).is_absolute() and ".." not in Path(name).parts


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if the file is absent. Raise `UserError`
    for other content."""
    name = f"'{path}'"
    if not regular_file(path, name).exists():
        return {}
    with os_errors_as(f"{name} cannot be read"):
        text = read_regular(path, name)
    try:
        content = parse_json(text, name)
    except UserError as error:
        raise unreadable_file_error(path, str(error)) from error
    if not isinstance(content, dict):
        raise UserError(f"{name} must contain a JSON object, not {type(content).__name__}")
    return content


def parse_json(text: str | bytes, name: str) -> object:
    """Return the value of an untrusted JSON text (bytes are UTF-8), called `name` in messages.
    Raise `UserError` if it is not JSON, or is nested too deeply to process."""
    try:
        content = json.loads(text)
        levels: int = _levels(content) if _may_be_deep(text) else 0
    except RecursionError:
        levels = _MOST_JSON_LEVELS + 1
    # also for bytes that are not UTF-8 and numbers with thousands of digits
    except ValueError as error:
        raise UserError(f"{name} is not valid JSON: {error}") from error
    if levels > _MOST_JSON_LEVELS:
        raise UserError(f"{name} is nested more than {_MOST_JSON_LEVELS} levels deep")
    return content


def json_lines(
    path: Path, usable: Callable[[dict[str, object]], bool], broken: list[int]
) -> Iterator[dict[str, Any]]:
    """Yield the usable objects of a file of JSON lines, and append the numbers of its other lines
    to `broken`; nothing if the file is absent. End after `MOST_BROKEN_LINES` of these, since each
    takes time, and at a line that is too long for a record of a run. Raise `UserError` if the file
    cannot be read."""
    if not path.exists():
        return
    with os_errors_as(f"'{path}' cannot be read"), open_regular(path) as file:
        lines = iter(lambda: file.readline(_MOST_LINE_BYTES), b"")
        for number, line in enumerate(lines, start=1):
            try:
                value = parse_json(line, "the line") if line.startswith(b"{") else None
            except UserError:
                value = None
            if isinstance(value, dict) and usable(value):
                yield value
                continue
            broken.append(number)
            if len(broken) == MOST_BROKEN_LINES or len(line) == _MOST_LINE_BYTES:
                return


def _may_be_deep(text: str | bytes) -> bool:
    """Return whether a text has more brackets than levels are allowed, counted in a fraction of the
    time of `_levels`."""
    curly, square = ("{", "[") if isinstance(text, str) else (b"{", b"[")
    return text.count(curly) + text.count(square) > _MOST_JSON_LEVELS  # type: ignore[arg-type]


def _levels(content: object) -> int:
    levels, level = 0, [content]
    while level := [value for value in level if isinstance(value, (dict, list))]:
        levels += 1
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
        ]
    return levels


def check_output_folder(folder: str, model: str) -> None:
    """Raise `UserError` if the output folder of a run is the folder of a model."""
    same = bool(model) and os.path.realpath(folder) == os.path.realpath(os.path.expanduser(model))
    if same and os.path.isfile(os.path.join(folder, "config.json")):
        raise UserError(
            f"--dump_folder {folder} is the folder of the model (--hf_assets_path); choose another "
            "one for the files of the run"
        )


def missing_folder_error(path: str | Path) -> UserError:
    """Return the error for a missing folder of model files, with the download command for a Hugging
    Face Hub id, or the names of a run's other checkpoints."""
    folder = Path(path)
    if page := _HUB_PAGE.match(str(path)):
        return UserError(
            f"{page[0]} is a page of the Hugging Face Hub, and no folder; run torchtitan download "
            f"{page[1]}, and use ./{DOWNLOADS / page[1].rpartition('/')[2]}"
        )
    if folder.is_file() and folder.suffix == ".gguf":
        return UserError(
            f"{folder} is a GGUF file, which programs for inference read; use the folder of the "
            "model that it was made of (torchtitan download)"
        )
    if folder.exists():
        return UserError(f"{folder} is not a folder but a file; use the folder that contains it")
    missing = f"{folder} does not exist"
    if steps := sorted(
        int(path.name[5:]) for path in folder.parent.glob("step-*") if path.name[5:].isdecimal()
    ):
        return UserError(
            f"{missing}; there are the checkpoints {', '.join(f'step-{step}' for step in steps)}"
        )
    if folder.parent.parts[-2:] == DOWNLOADS.parts:
        owner = "meta-llama" if _META.match(folder.name) else "OWNER"
        dest = "" if folder.parent == DOWNLOADS else f" --dest {folder}"
        return UserError(
            f"{missing}; to download the model, run: torchtitan download "
            f"{owner}/{folder.name}{dest}"
        )
    # If the parent folder exists, the argument is a mistyped path rather than a Hub id.
    if not _HUB_ID.fullmatch(str(folder)) or folder.parent.exists():
        return UserError(f"{missing}; use the folder that contains the model's files")
    downloaded = DOWNLOADS / folder.name
    if downloaded.is_dir():
        return UserError(f"{missing}, but is the name of a downloaded model; use ./{downloaded}")
    return UserError(
        f"{missing}; if it is a model on the Hugging Face Hub, run torchtitan download {folder}, "
        f"and use ./{downloaded}"
    )


def inner_folder(folder: Path) -> str:
    """Return advice for a folder of the cache of the Hugging Face Hub, whose models are in
    `snapshots`; "" for other folders."""
    found = sorted(folder.glob("snapshots/*/"))
    return f"; it is in the cache of the Hub: use {found[-1]}" if found else ""


def file_to_copy(folder: Path, name: str) -> Path:
    """Return a model folder's file or folder `name`, for copying. Raise `UserError` for a link out
    of the folder.

    An untrusted folder may link to any file of this machine, which an export would then publish.
    The code that reads weights follows any link.
    """
    path = folder / name
    if not is_stored_in(folder, path):
        raise UserError(
            f"{path} is a link to {os.path.realpath(path)}, outside the folder; replace it with a "
            "copy"
        )
    return path


def is_stored_in(folder: Path, path: Path) -> bool:
    """Return whether the real path of a file, which may be absent, is in a folder. The folder
    itself may be a link, and the Hugging Face cache links a snapshot's files to the `blobs` of its
    repository."""
    home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    cached = (outer.parent for outer in (home, *home.parents) if outer.parent.name == "snapshots")
    repository = next(
        (each.parent for each in cached if each.parent.name.startswith(_CACHED)), home
    )
    return target.is_relative_to(repository)


def unreadable_file_error(file: str | Path, message: str) -> UserError:
    """Return the error for a model's file, local or behind a URL: `message`, or a hint for a Git
    LFS pointer."""
    path = Path(file)
    if path.is_file() and is_lfs_pointer(path):
        return UserError(
            f"{file} is a Git LFS pointer in place of the file itself: fetch the file with `git "
            "lfs pull`, or the model with `torchtitan download`"
        )
    return UserError(message)


def reject_lfs_pointer(path: Path) -> None:
    """Raise `UserError` for a file of data that is Git's placeholder."""
    if is_lfs_pointer(path):
        raise UserError(
            f"{path} is a Git LFS pointer in place of the file itself; fetch the file with `git "
            "lfs pull`"
        )


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is Git's placeholder for a large file."""
    with open_regular(path) as opened:
        return opened.read(len(_LFS_POINTER)) == _LFS_POINTER

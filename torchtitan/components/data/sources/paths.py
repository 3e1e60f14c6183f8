"""Local data by its path: which files and folders a dataset string names."""

import difflib
import glob
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from torchtitan.components.data.sources.files import file_format, supported_formats
from torchtitan.components.data.sources.rows import regular_file
from torchtitan.tools.errors import UserError

_PATTERN_CHARACTERS = "*?["
_SPLIT = re.compile(r"\w[\w.-]*")
"""The name of a split, which is also the name of a folder; `..` is none."""


def local_splits(dataset: str) -> tuple[str, ...]:
    """Return the splits of a local path: a saved `DatasetDict` has several; all else is one split, `train`."""
    path = _path(dataset)
    if not _is_saved_dict(path):
        return ("train",)
    try:
        splits = json.loads((path / _SAVED_DICT).read_bytes())["splits"]
        if splits and isinstance(splits, list) and all(map(_SPLIT.fullmatch, splits)):
            return tuple(splits)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    raise UserError(f"{path / _SAVED_DICT} is damaged: it does not name the splits; save the data set again")


def saved_dataset(dataset: str, split: str) -> Path | None:
    """Return the folder that `datasets.save_to_disk` wrote for a split; None if it did not write the path."""
    path = _path(dataset)
    if _is_saved_dict(path):
        return path / split
    return path if all(os.path.isfile(path / name) for name in ("state.json", "dataset_info.json")) else None


def location(dataset: str) -> str:
    """Return a dataset string that is valid in any working directory: a local path or pattern becomes absolute, even if
    the file is gone."""
    path = _path(dataset)
    is_local = os.path.exists(path) or path.suffix or any(character in dataset for character in _PATTERN_CHARACTERS)
    return os.path.realpath(path) if is_local else dataset


_SAVED_DICT = "dataset_dict.json"


def _path(dataset: str) -> Path:
    return Path(os.path.expanduser(dataset))


def _is_saved_dict(path: Path) -> bool:
    return os.path.isfile(path / _SAVED_DICT)


def local_files(dataset: str, names: Sequence[str]) -> dict[str, Path]:
    """Return the files of a path or pattern by the names that messages show, sorted, each real file once, however many
    links lead to it.

    Args:
        dataset: a file, a folder, which is searched for files of a known format, or a pattern.
        names: the data sets that have a name, for the message.

    Raises:
        UserError: there are none, or one cannot be read: a link to nothing, a pipe, a folder without permission.
    """
    path = _path(dataset)
    try:
        if path.is_file() and dataset:
            return {path.name: _readable(path)}
        if path.is_dir() and dataset:
            found = _once(file for folder in _folders(path) for file in _data_files(folder))
            if not found:
                raise UserError(f"folder {dataset!r} has no file that can be read ({supported_formats()})")
            return {str(file.relative_to(path)): file for file in found}
        if path.exists() and dataset:
            raise UserError(f"{dataset!r} is not a regular file; save its content in one")
        if any(character in dataset for character in _PATTERN_CHARACTERS):
            matches = _once(_readable(match) for match in _matches(path) if not match.is_dir())
            if not matches:
                raise UserError(f"no file matches the pattern {dataset!r}")
            return {str(match): match for match in matches}
        raise UserError(_not_found(dataset, path, names))
    except OSError as error:
        raise UserError(f"dataset {dataset!r}: {error.filename} cannot be read: {error.strerror}") from error


def _folders(top: Path) -> Iterator[Path]:
    """Yield a folder and all below it except hidden ones. Each real one comes once, under its own name rather than that
    of a link, so that a link to a folder above it ends nowhere."""
    seen, waiting = set(), deque([top])
    while waiting:
        folder = waiting.popleft()
        if (place := os.path.realpath(folder)) in seen:
            continue
        seen.add(place)
        yield folder
        inside = sorted((entry for entry in _visible(folder) if _is_folder(entry)), key=lambda entry: entry.name)
        waiting.extendleft(Path(entry) for entry in reversed(inside) if not entry.is_symlink())
        waiting.extend(Path(entry) for entry in inside if entry.is_symlink())


def _visible(folder: Path) -> list["os.DirEntry[str]"]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    return entry.is_dir(follow_symlinks=False) or entry.is_symlink() and os.path.isdir(entry)


def _data_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a known format in a folder; raises `UserError` for a link to nothing, which may be to a file
    or a folder of data."""
    for entry in _visible(folder):
        path = folder / entry.name
        if not _is_folder(entry) and (file_format(path) is not None or entry.is_symlink() and not path.exists()):
            yield regular_file(path)


def _matches(pattern: Path) -> Iterator[Path]:
    """Yield the paths that match a pattern, in which `**` is every folder below once, as of `_folders`."""
    if "**" not in pattern.parts:
        yield from map(Path, glob.glob(str(pattern)))
        return
    depth = pattern.parts.index("**")
    for top in sorted(glob.glob(str(Path(*pattern.parts[:depth])))):
        if os.path.isdir(top):
            for folder in _folders(Path(top)):
                yield from _matches(Path(glob.escape(str(folder)), *(pattern.parts[depth + 1 :] or ("*",))))


def _once(files: Iterable[Path]) -> list[Path]:
    """Return each real file once, by its own name rather than a link's, sorted by name."""
    real = cache(os.path.realpath)
    by_place: dict[str, Path] = {}
    for is_link, name, file in sorted((file.is_symlink(), str(file), file) for file in files):
        by_place.setdefault(real(name) if is_link else os.path.join(real(file.parent), file.name), file)
    return sorted(by_place.values(), key=str)


def _readable(path: Path) -> Path:
    if file_format(path) is None:
        raise UserError(f"{path}: files of this kind cannot be read as data ({supported_formats()} can)")
    return regular_file(path)


def _not_found(dataset: str, path: Path, names: Sequence[str]) -> str:
    missing = next(step for step in (*reversed(path.parents), path) if not step.exists()) if dataset else path
    siblings = sorted(os.listdir(missing.parent)) if missing.parent.is_dir() else []
    is_name = os.sep not in dataset
    near = difflib.get_close_matches(missing.name, [*siblings, *(names if is_name else ())], n=1)
    if is_name:
        message = f"dataset {dataset!r} is neither a registered name ({', '.join(names)}) nor a file or folder"
        return message + (f"; did you mean {near[0]!r}?" if near else "; give one of these or a local path")
    message = f"dataset {dataset!r}: {missing} does not exist"
    return message + (f"; did you mean {missing.parent / near[0]}?" if near else "")

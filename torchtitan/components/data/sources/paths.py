"""Resolution of dataset strings to local files and folders."""

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from torchtitan.components.data.sources.files import file_format, supported_formats
from torchtitan.components.data.sources.lakes import reject_tables, warn_of_tables
from torchtitan.tools.errors import UserError, suggest
from torchtitan.tools.files import is_url, read_regular, regular_file

_QUICK_SIZE = 2**24
"""Bytes of a file that are parsed in a moment."""

_SPLIT = re.compile(r"\w[\w.-]*")
"""Valid name of a split, which is also a folder name; excludes `..`."""


def local_splits(dataset: str) -> tuple[str, ...]:
    """Return the splits of a saved `DatasetDict`, otherwise `train`."""
    path = _path(dataset)
    if not _is_saved_dict(path):
        return ("train",)
    try:
        splits = json.loads(read_regular(path / _SAVED_DICT))["splits"]
        if splits and isinstance(splits, list) and all(map(_SPLIT.fullmatch, splits)):
            return tuple(splits)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    raise UserError(
        f"{path / _SAVED_DICT} is damaged: it contains no list of splits; save the dataset again"
    )


def saved_dataset(dataset: str, split: str) -> Path | None:
    """Return the folder of a split written by `datasets.save_to_disk`; None for other paths."""
    path = _path(dataset)
    if _is_saved_dict(path):
        return path / split
    return (
        path
        if all(os.path.isfile(path / name) for name in ("state.json", "dataset_info.json"))
        else None
    )


def searched_folder(dataset: str) -> Path | None:
    """Return the path of a folder; None for other paths."""
    path = _path(dataset)
    return path if path.is_dir() else None


def is_quick_to_open(dataset: str) -> bool:
    """Return whether a dataset is a file, or a folder of files, that are read in a moment even if
    their format is read as a whole. False if they cannot be listed, which opening them explains."""
    path = _path(dataset)
    try:
        files = [path]
        if path.is_dir():
            files = [folder / name for folder, names in _folders(path) for name in names]
        return all(file.stat().st_size <= _QUICK_SIZE for file in files)
    except OSError:
        return False


def location(dataset: str) -> str:
    """Make local paths absolute, even of deleted files; return other dataset strings unchanged."""
    if is_url(dataset):
        return dataset
    path = _path(dataset)
    is_local = os.path.exists(path) or path.suffix or glob.has_magic(dataset)
    return os.path.realpath(path) if is_local else dataset


_SAVED_DICT = "dataset_dict.json"


def _path(dataset: str) -> Path:
    return Path(os.path.expanduser(dataset))


def _is_saved_dict(path: Path) -> bool:
    return os.path.isfile(path / _SAVED_DICT)


def local_files(dataset: str, names: Sequence[str]) -> dict[str, Path]:
    """Return the files of a path or pattern by display name, sorted; links to the same file are
    merged. Raise `UserError` if no file is found, or a path cannot be read: a broken link, a pipe,
    a folder without permission.

    Args:
        dataset: file, glob pattern, or folder to search for files of known formats.
        names: registered datasets, for the error message.
    """
    path = _path(dataset)
    try:
        if path.is_file() and dataset:
            found_file = _readable(path)
            warn_of_tables([path.absolute().as_posix()], _glob_name)
            return {path.name: found_file}
        if path.is_dir() and dataset:
            folders = list(_folders(path))
            reject_tables(dataset, _all_files(folders))
            found = _without_duplicates(file for names in folders for file in _data_files(*names))
            if not found:
                raise UserError(
                    f"the folder {dataset!r} contains no data files ({supported_formats()})"
                )
            return {str(file.relative_to(path)): file for file in found}
        if path.exists() and dataset:
            raise UserError(f"{dataset!r} is not a regular file; save its content to a file")
        if glob.has_magic(dataset):
            matches = _without_duplicates(
                _readable(match) for match in _matches(path) if not match.is_dir()
            )
            if not matches:
                raise UserError(f"no file matches the pattern {dataset!r}")
            warn_of_tables((match.absolute().as_posix() for match in matches), _glob_name)
            return {str(match): match for match in matches}
        raise UserError(_not_found_message(dataset, path, names))
    except OSError as error:
        raise UserError(
            f"dataset {dataset!r}: {error.filename} cannot be read: {error.strerror}"
        ) from error


def _folders(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and its subfolders, except hidden ones, with the names of their files. Links
    are followed, and may be cyclic: each real folder is yielded once, in each folder subfolders
    before links."""

    def fail(error: OSError) -> None:
        raise error

    visited = set()
    for folder, subfolders, names in os.walk(top, onerror=fail, followlinks=True):
        if (real_path := os.path.realpath(folder)) in visited:
            subfolders.clear()
            continue
        visited.add(real_path)
        visible = (Path(folder, name) for name in subfolders if name[0] != ".")
        subfolders[:] = [
            path.name for path in sorted(visible, key=lambda path: (path.is_symlink(), path.name))
        ]
        yield Path(folder), names


def _all_files(folders: Iterable[tuple[Path, list[str]]]) -> Iterator[str]:
    """Yield the paths of all files of folders, and of those that mark hidden folders of tables."""
    for folder, names in folders:
        for name in names:
            yield (folder / name).as_posix()
        yield from glob.glob(str(Path(glob.escape(str(folder)), ".hoodie", "*")))


def _glob_name(path: str) -> list[str]:
    """Return the files whose name matches the last part of a path."""
    folder, name = os.path.split(path)
    return glob.glob(os.path.join(glob.escape(folder), name))


def _data_files(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield the files of known formats. Raise `UserError` for a broken link, which may be data."""
    for path in (folder / name for name in names if name[0] != "."):
        if file_format(path) is not None or path.is_symlink() and not path.exists():
            yield regular_file(path)


def _matches(pattern: Path) -> Iterator[Path]:
    """Yield the paths that match a pattern; `**` matches all subfolders, each once as in
    `_folders`."""
    if "**" not in pattern.parts:
        yield from map(Path, glob.glob(str(pattern)))
        return
    depth = pattern.parts.index("**")
    for top in sorted(glob.glob(str(Path(*pattern.parts[:depth])))):
        if os.path.isdir(top):
            for folder, _ in _folders(Path(top)):
                yield from _matches(
                    Path(glob.escape(str(folder)), *(pattern.parts[depth + 1 :] or ("*",)))
                )


def _without_duplicates(files: Iterable[Path]) -> list[Path]:
    """Return each real file once, sorted, preferably by its own path instead of a link's."""
    real = cache(os.path.realpath)
    by_real_path: dict[str, Path] = {}
    for is_link, name, file in sorted((file.is_symlink(), str(file), file) for file in files):
        by_real_path.setdefault(
            real(name) if is_link else os.path.join(real(file.parent), file.name), file
        )
    return sorted(by_real_path.values(), key=str)


def _readable(path: Path) -> Path:
    if file_format(path) is None:
        raise UserError(
            f"{path}: the file format is not supported; use one of: {supported_formats()}"
        )
    return regular_file(path)


def _not_found_message(dataset: str, path: Path, names: Sequence[str]) -> str:
    missing = (
        next(step for step in (*reversed(path.parents), path) if not step.exists())
        if dataset
        else path
    )
    if missing.is_symlink():
        target = os.readlink(missing)
        return (
            f"dataset {dataset!r}: {missing} is a link to '{target}', which does not exist; fix or "
            "remove it"
        )
    parts = [part for part in dataset.split(",") if part]
    if len(parts) > 1 and any(os.path.exists(_path(part.strip())) for part in parts):
        return f"dataset {dataset!r}: separate several with spaces: {' '.join(parts)}"
    siblings = sorted(os.listdir(missing.parent)) if missing.parent.is_dir() else []
    is_name = os.sep not in dataset
    near = suggest(missing.name, [*siblings, *(names if is_name else ())])
    if is_name:
        message = (
            f"dataset {dataset!r} is neither a registered name ({', '.join(names)}) nor a file or "
            "folder"
        )
        return message + (near or "; use one of these or a local path")
    return f"dataset {dataset!r}: {missing} does not exist{near}"

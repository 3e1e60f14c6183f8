"""Local data by its path: which files and folders a dataset string names."""

import difflib
import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path

from torchtitan.components.data.readers import file_format, supported_formats
from torchtitan.tools.errors import UserError

_PATTERN_CHARACTERS = "*?["


def local_splits(dataset: str) -> tuple[str, ...]:
    """The splits of a local path: those of a saved `DatasetDict`; all else is one split, `train`."""
    path = Path(dataset).expanduser()
    if _is_saved_dict(path):
        return tuple(json.loads((path / "dataset_dict.json").read_text())["splits"])
    return ("train",)


def saved_dataset(dataset: str, split: str) -> Path | None:
    """The folder that `datasets.save_to_disk` wrote for a split; None if the path is none of its making."""
    path = Path(dataset).expanduser()
    if _is_saved_dict(path):
        return path / split
    return path if (path / "state.json").is_file() and (path / "dataset_info.json").is_file() else None


def location(dataset: str) -> str:
    """Return a dataset string that is valid in any working directory: a local path or pattern becomes absolute, even if
    the file is gone."""
    path = Path(dataset).expanduser()
    is_local = path.exists() or path.suffix or any(character in dataset for character in _PATTERN_CHARACTERS)
    return str(path.resolve()) if is_local else dataset


def _is_saved_dict(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file()


def local_files(dataset: str, names: Sequence[str]) -> dict[str, Path]:
    """The files of a path or pattern under the names that messages show, sorted.

    Args:
        dataset: a file, a folder, which is searched for files of a known format, or a pattern.
        names: the data sets that have a name, for the message.

    Raises:
        UserError: there are none.
    """
    path = Path(dataset).expanduser()
    if path.is_file() and dataset:
        return {path.name: _readable(path)}
    if path.is_dir() and dataset:
        found = {name: path / name for name in sorted(glob.glob("**", root_dir=path, recursive=True))}
        files = {name: file for name, file in found.items() if file.is_file() and file_format(file)}
        if not files:
            raise UserError(f"folder {dataset!r} has no file that can be read ({supported_formats()})")
        return files
    if path.exists() and dataset:
        raise UserError(f"{dataset!r} is not a regular file; save its content in one")
    if any(character in dataset for character in _PATTERN_CHARACTERS):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        files = {str(match): _readable(match) for match in matches if match.is_file()}
        if not files:
            raise UserError(f"no file matches the pattern {dataset!r}")
        return files
    raise UserError(_not_found(dataset, path, names))


def _readable(path: Path) -> Path:
    if file_format(path) is None:
        raise UserError(f"{path}: files of this kind cannot be read as data ({supported_formats()} can)")
    return path


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

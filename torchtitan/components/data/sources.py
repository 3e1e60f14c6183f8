"""What `--dataloader.dataset` may say, and the documents behind it.

Local data is a `Source`: it can be read again and again, and is tokenized into a cache. A registered data set is a
`StreamSource` (see `hub`), read as training goes.
"""

import difflib
import glob
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, cast

from torchtitan.components.data import stories
from torchtitan.components.data.hub import StreamSource, registered_datasets
from torchtitan.components.data.readers import (
    Document,
    OnRead,
    check_column,
    check_text,
    file_format,
    read_documents,
    supported_formats,
)
from torchtitan.tools.errors import UserError


class Part(ABC):
    """A named piece of a source: a file, or a split."""

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def size(self) -> int:
        """What `on_read` adds up to when all has been read: bytes or documents."""

    @abstractmethod
    def documents(self, on_read: OnRead) -> Iterator[Document]:
        """The documents in their order, each to be read before the next is asked for."""


class Source(ABC):
    """Local documents in a fixed order."""

    def __init__(self, name: str, parts: Sequence[Part]):
        self.name = name
        self.parts = parts

    @abstractmethod
    def identity(self, digest: Callable[[Path], str]) -> list[str]:
        """What the documents are made of: equal lists mean equal documents. `digest` is that of a file's content."""


class StoriesSource(Source):
    """The embedded corpus."""

    def __init__(self, split: str):
        self.split = cast(Literal["train", "validation"], split)
        super().__init__("stories", [_StoriesPart(f"stories ({split})", self.split)])

    def identity(self, digest: Callable[[Path], str]) -> list[str]:
        return ["stories", stories.VERSION, self.split]


class _StoriesPart(Part):
    def __init__(self, name: str, split: Literal["train", "validation"]):
        super().__init__(name)
        self.stories = stories.Stories(split)

    def size(self) -> int:
        return len(self.stories)

    def documents(self, on_read: OnRead) -> Iterator[Document]:
        for index in range(len(self.stories)):
            yield (self.stories[index],)
            on_read(1)


class FilesSource(Source):
    """One file or several."""

    def __init__(self, name: str, files: dict[str, Path], text_column: str):
        self.files = files
        self.text_column = text_column
        super().__init__(name, [_FilePart(shown, path, text_column) for shown, path in files.items()])

    def identity(self, digest: Callable[[Path], str]) -> list[str]:
        column = f"column {self.text_column}"
        return [column, *(f"{file_format(path)} {path.suffix} {digest(path)}" for path in self.files.values())]


class _FilePart(Part):
    def __init__(self, name: str, path: Path, text_column: str):
        super().__init__(name)
        self.path = path
        self.text_column = text_column

    def size(self) -> int:
        return self.path.stat().st_size

    def documents(self, on_read: OnRead) -> Iterator[Document]:
        return read_documents(self.path, self.text_column, on_read)


class SavedDatasetSource(Source):
    """A folder that `datasets.Dataset.save_to_disk` wrote."""

    def __init__(self, name: str, folder: Path, text_column: str):
        self.folder = folder
        self.text_column = text_column
        super().__init__(name, [_SavedDatasetPart(folder.name, folder, text_column)])

    def identity(self, digest: Callable[[Path], str]) -> list[str]:
        files = sorted(path for path in self.folder.iterdir() if path.is_file())
        return ["datasets", f"column {self.text_column}", *(digest(path) for path in files)]


class _SavedDatasetPart(Part):
    def __init__(self, name: str, folder: Path, text_column: str):
        super().__init__(name)
        self.folder = folder
        self.text_column = text_column

    def size(self) -> int:
        from datasets import load_from_disk

        return len(load_from_disk(self.folder))

    def documents(self, on_read: OnRead) -> Iterator[Document]:
        from datasets import load_from_disk

        dataset = load_from_disk(self.folder)
        check_column(dataset.column_names, self.text_column, str(self.folder))
        rows = dataset.with_format(None).select_columns([self.text_column])
        for index, row in enumerate(rows, 1):
            yield (check_text(row[self.text_column], self.text_column, f"{self.folder}, row {index}"),)
            on_read(1)


def resolve_source(dataset: str, text_column: str | None = None, split: str = "train") -> Source | StreamSource:
    """The documents that a dataset string names.

    Args:
        dataset: `stories`, a registered name, or a local path (`~` is the home folder): a file, a folder, which is
            searched for files of a known format, a glob pattern, or a folder written by `datasets.save_to_disk`.
            A name wins over a path of the same spelling; write `./stories` for the path.
        text_column: column that holds the text of a table; None: a registered data set's own, and `text` elsewhere.
        split: `train`, or another that the data set has.

    Raises:
        UserError: there is no such data set, path, split, or reader for the file.
    """
    splits = available_splits(dataset)
    if split not in splits:
        raise UserError(f"dataset {dataset!r} has no split {split!r}; it has: {', '.join(splits)}")
    if dataset == "stories":
        return StoriesSource(split)
    registered = registered_datasets().get(dataset)
    if registered is not None:
        column = text_column or registered.text_column
        return StreamSource(name=dataset, dataset=registered, split=split, text_column=column)
    path = Path(dataset).expanduser()
    if _is_saved_dataset_dict(path):
        return SavedDatasetSource(dataset, path / split, text_column or "text")
    if _is_saved_dataset(path):
        return SavedDatasetSource(dataset, path, text_column or "text")
    return FilesSource(dataset, _local_files(dataset, path), text_column or "text")


def available_splits(dataset: str) -> tuple[str, ...]:
    """The splits of a dataset string; local files are all one split, `train`."""
    if dataset == "stories":
        return tuple(stories.N_STORIES)
    if dataset in registered_datasets():
        return registered_datasets()[dataset].splits
    path = Path(dataset).expanduser()
    if _is_saved_dataset_dict(path):
        return tuple(json.loads((path / "dataset_dict.json").read_text())["splits"])
    return ("train",)


def _is_saved_dataset_dict(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file()


def _is_saved_dataset(path: Path) -> bool:
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _local_files(dataset: str, path: Path) -> dict[str, Path]:
    """The files of a path or pattern under the names that messages show, sorted."""
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
    if any(character in dataset for character in "*?["):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        files = {str(match): _readable(match) for match in matches if match.is_file()}
        if not files:
            raise UserError(f"no file matches the pattern {dataset!r}")
        return files
    raise UserError(_not_found(dataset, path))


def _readable(path: Path) -> Path:
    if file_format(path) is None:
        raise UserError(f"{path}: files of this kind cannot be read as data ({supported_formats()} can)")
    return path


def _not_found(dataset: str, path: Path) -> str:
    names = ["stories", *registered_datasets()]
    missing = next(step for step in (*reversed(path.parents), path) if not step.exists()) if dataset else path
    siblings = sorted(os.listdir(missing.parent)) if missing.parent.is_dir() else []
    is_name = os.sep not in dataset
    near = difflib.get_close_matches(missing.name, siblings + (names if is_name else []), n=1)
    if is_name:
        message = f"dataset {dataset!r} is neither a registered name ({', '.join(names)}) nor a file or folder"
        return message + (f"; did you mean {near[0]!r}?" if near else "; give one of these or a local path")
    message = f"dataset {dataset!r}: {missing} does not exist"
    return message + (f"; did you mean {missing.parent / near[0]}?" if near else "")

"""What `--dataloader.dataset` may say, and the documents behind it.

Local data is a `Source`: it can be read again and again, and is tokenized into a cache. A registered data set is a
`StreamSource` (see `hub`), read as training goes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, cast

from torchtitan.components.data import stories
from torchtitan.components.data.hub import StreamSource, registered_datasets
from torchtitan.components.data.local_data import local_files, local_splits, saved_dataset
from torchtitan.components.data.readers import Document, OnRead, file_format, read_documents, text_of
from torchtitan.components.data.tables import Table, saved_table
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
        self.table = saved_table(folder)
        self.text_column = text_column
        super().__init__(name, [_SavedDatasetPart(folder, self.table, text_column)])

    def identity(self, digest: Callable[[Path], str]) -> list[str]:
        return ["datasets", f"column {self.text_column}", *(digest(path) for path in self.table.files())]


class _SavedDatasetPart(Part):
    def __init__(self, folder: Path, table: Table, text_column: str):
        super().__init__(folder.name)
        self.folder = folder
        self.table = table
        self.text_column = text_column

    def size(self) -> int:
        return len(self.table)

    def documents(self, on_read: OnRead) -> Iterator[Document]:
        for row in self.table.rows(str(self.folder), on_read, self.text_column):
            yield text_of(row, self.text_column)


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
    if folder := saved_dataset(dataset, split):
        return SavedDatasetSource(dataset, folder, text_column or "text")
    files = local_files(dataset, ["stories", *registered_datasets()])
    return FilesSource(dataset, files, text_column or "text")


def available_splits(dataset: str) -> tuple[str, ...]:
    """The splits of a dataset string; local files are all one split, `train`."""
    if dataset == "stories":
        return tuple(stories.N_STORIES)
    if dataset in registered_datasets():
        return registered_datasets()[dataset].splits
    return local_splits(dataset)

"""Rows of tables: what fine-tuning data is made from, whatever kind of file it is in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from torchtitan.components.data import stories
from torchtitan.components.data.finetuning import chats
from torchtitan.components.data.finetuning.registry import ChatDataset, registered_chat_datasets
from torchtitan.components.data.hub import cannot_be_read
from torchtitan.components.data.local_data import local_files, local_splits, saved_dataset
from torchtitan.components.data.readers import OnRead, Row, file_format, read_rows
from torchtitan.components.data.tables import Table, hub_table, saved_table
from torchtitan.tools.errors import UserError

__all__ = ["Row", "RowSource", "available_row_splits", "resolve_rows"]

Split = Literal["train", "validation"]


class RowSource(ABC):
    """Rows in a fixed order, that can be read again and again."""

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def identity(self, digest: Callable[[Path], str]) -> list[str]:
        """What the rows are made of: equal lists mean equal rows at places of equal names. `digest` is that of a file's
        content."""

    @abstractmethod
    def rows(self, on_read: OnRead) -> Iterator[Row]:
        """The rows in their order, without blank lines; raises `UserError` for a file that cannot be read."""

    @abstractmethod
    def size(self) -> int:
        """What `on_read` adds up to when all has been read: bytes or rows."""


class _EmbeddedRows(RowSource):
    """Rows that this package writes itself.

    Args:
        name: of the data set.
        split: of the data set.
        version: equal ones write equal rows.
        n_rows: how many there are.
        row: the i-th.
    """

    def __init__(self, name: str, split: str, version: str, n_rows: int, row: Callable[[int], dict[str, Any]]):
        super().__init__(name)
        self.split, self.version, self.n_rows, self.row = split, version, n_rows, row

    def identity(self, digest: Callable[[Path], str]) -> list[str]:
        return [self.name, self.version, self.split]

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        for i in range(self.n_rows):
            yield Row(i + 1, f"{self.name} ({self.split}), row {i + 1}", self.row(i))
            on_read(1)

    def size(self) -> int:
        return self.n_rows


class _FileRows(RowSource):
    """One file or several."""

    def __init__(self, name: str, files: Mapping[str, Path]):
        super().__init__(name)
        self.files = files

    def identity(self, digest: Callable[[Path], str]) -> list[str]:
        # The names too, since the rows' places have them.
        return [f"{shown} {file_format(path)} {path.suffix} {digest(path)}" for shown, path in self.files.items()]

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        for shown, path in self.files.items():
            for row in read_rows(path, shown, on_read):
                if row.values is not None or row.error:
                    yield row

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())


class _SavedRows(RowSource):
    """A folder that `datasets.save_to_disk` wrote."""

    def __init__(self, name: str, folder: Path):
        super().__init__(name)
        self.folder = folder
        self.table = saved_table(folder)

    def identity(self, digest: Callable[[Path], str]) -> list[str]:
        return ["datasets", self.folder.name, *(digest(path) for path in self.table.files())]

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        return self.table.rows(self.folder.name, on_read)

    def size(self) -> int:
        return len(self.table)


class _HubRows(RowSource):
    """A repository on the Hugging Face hub."""

    def __init__(self, name: str, dataset: ChatDataset, split: str):
        super().__init__(name)
        self.dataset, self.split = dataset, split

    @cached_property
    def _table(self) -> Table:
        table = hub_table(self.dataset.path, self.dataset.name, self.split)
        try:
            len(table)
        except Exception as error:  # of `hub_table`
            message = cannot_be_read(self.name, self.dataset.path, self.dataset.name, self.split, error)
            raise UserError(f"{message}; check the network, or give a local path") from error
        return table

    def identity(self, digest: Callable[[Path], str]) -> list[str]:
        return ["hub", self.name, self.split, *(digest(path) for path in self._table.files())]

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        return self._table.rows(f"{self.name} ({self.split})", on_read)

    def size(self) -> int:
        return len(self._table)


def resolve_rows(dataset: str, split: str = "train") -> RowSource:
    """The rows that a dataset string names.

    Args:
        dataset: `chats` or `stories`, a name of `register_chat_dataset`, or a local path (`~` is the home folder): a
            file, a folder, which is searched for files of a known format, a glob pattern, or a folder written by
            `datasets.save_to_disk`. A name wins over a path of the same spelling; write `./chats` for the path.
        split: `train`, or another that the data set has.

    Raises:
        UserError: there is no such data set, path, split, or reader for the file.
    """
    splits = available_row_splits(dataset)
    if split not in splits:
        raise UserError(f"dataset {dataset!r} has no split {split!r}; it has: {', '.join(splits)}")
    if dataset in _EMBEDDED:
        return _EMBEDDED[dataset](split)
    if (registered := registered_chat_datasets().get(dataset)) is None:
        return _local_rows(dataset, dataset, split)
    if registered.on_hub():
        return _HubRows(dataset, registered, split)
    if "{split}" not in registered.path and split not in local_splits(registered.path):
        raise UserError(f"dataset {dataset!r}: {registered.path} has no split {split!r}; write {{split}} in its path")
    return _local_rows(dataset, registered.path.replace("{split}", split), split)


def available_row_splits(dataset: str) -> tuple[str, ...]:
    """The splits of a dataset string, see `resolve_rows`; local files are all one split, `train`."""
    if dataset == "chats":
        return tuple(chats.N_CHATS)
    if dataset == "stories":
        return tuple(stories.N_STORIES)
    if dataset in registered_chat_datasets():
        return registered_chat_datasets()[dataset].splits
    return local_splits(dataset)


def _local_rows(name: str, path: str, split: str) -> RowSource:
    if folder := saved_dataset(path, split):
        return _SavedRows(name, folder)
    return _FileRows(name, local_files(path, [*_EMBEDDED, *registered_chat_datasets()]))


def _chats(split: str) -> RowSource:
    items = chats.Chats(cast(Split, split))
    return _EmbeddedRows("chats", split, chats.VERSION, len(items), lambda i: {"messages": items[i]})


def _stories(split: str) -> RowSource:
    items = stories.Stories(cast(Split, split))
    return _EmbeddedRows("stories", split, stories.VERSION, len(items), lambda i: {"text": items[i]})


_EMBEDDED = {"chats": _chats, "stories": _stories}

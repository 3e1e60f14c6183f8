"""What `--dataloader.dataset` may say, and the documents or rows behind it.

Local data is a `Source`: it can be read again and again, and is tokenized into a cache. A data set that is registered
for pre-training is a `StreamSource`, read as training goes.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from torchtitan.assets import chats, stories
from torchtitan.assets.generated import Generated
from torchtitan.components.data.sources.files import FilePart, file_format
from torchtitan.components.data.sources.paths import local_files, local_splits, saved_dataset
from torchtitan.components.data.sources.rows import Document, OnRead, Part, Row, check_column, check_text, first_line
from torchtitan.components.data.sources.tables import Table, saved_table
from torchtitan.tools.errors import UserError

AUTO = "auto"
"""The format of rows that is recognized by the columns."""

RowFunction = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""Takes a row, its cells by column, and gives one of a known format (`{"messages": […], "tools": […]}`,
`{"text": …}`, …), or None to leave it out."""


class Source:
    """Local data in a fixed order, as documents or as rows.

    Args:
        name: what the configuration calls it.
        parts: what it is made of, at least one.
        documents: whether it is read as documents; else as rows.
    """

    def __init__(self, name: str, parts: Sequence[Part], *, documents: bool):
        self.name = name
        self.parts = parts
        self._documents = documents

    def size(self) -> int:
        """What `on_read` adds up to when all has been read: bytes or rows."""
        return sum(part.size() for part in self.parts)

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        """The rows in their order, without blank lines; raises `UserError` for a file that cannot be read."""
        for part in self.parts:
            for row in part.rows(on_read):
                if row.values is not None or row.error:
                    yield row

    def identity(self, digest: Callable[[Path], str]) -> list[str]:
        """What the data is made of: equal lists mean equal documents, or equal rows at places of equal names. `digest`
        is that of a file's content."""
        contents = [part.contents(digest) for part in self.parts]
        if not self._documents:
            return [" ".join([part.name, *content]) for part, content in zip(self.parts, contents, strict=True)]
        first = self.parts[0]
        kind = [first.kind] if first.kind else []
        return [*kind, f"column {first.text_column}", *(item for content in contents for item in content)]


@dataclass(frozen=True, kw_only=True)
class _Registered:
    path: str
    """A repository on the Hugging Face hub (`allenai/c4`), or a local path: for pre-training a folder of data files;
    for fine-tuning as `--dataloader.dataset` takes it, where `{split}` becomes the split."""
    name: str | None = None
    """The configuration of the repository, if it has several."""
    splits: tuple[str, ...] = ("train",)
    """Its splits; one called `validation` serves as the validation data."""


@dataclass(frozen=True, kw_only=True)
class HubDataset(_Registered):
    """Where `datasets.load_dataset` finds a data set."""

    text_column: str = "text"
    """The column that holds the text."""


@dataclass(frozen=True, kw_only=True)
class ChatDataset(_Registered):
    """Where a data set is, and how its rows are read."""

    format: str = AUTO
    """As `--dataloader.format`."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The format's name for a column → the data set's."""
    function: RowFunction | None = None
    """Turns a row into one of a known format, or None to leave it out; in place of `format` and `columns`."""

    def says_format(self) -> bool:
        """Whether it says how its rows are read, rather than leave it to their columns."""
        return self.function is not None or self.format != AUTO or bool(self.columns)

    def on_hub(self) -> bool:
        """Whether `path` is a repository: it has the form of one, is no data file, and not there locally."""
        is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.path) is not None
        return is_name and file_format(Path(self.path)) is None and not Path(self.path).exists()


class _Embedded(NamedTuple):
    """A data set that comes with the package."""

    items: type[Generated[Any]]
    version: str
    column: str


_STORIES = _Embedded(stories.Stories, stories.VERSION, "text")
_CHATS = _Embedded(chats.Chats, chats.VERSION, "messages")

D = TypeVar("D", HubDataset, ChatDataset)


@dataclass
class Catalog(Generic[D]):
    """The names that the loaders of one kind take for data sets."""

    kind: str
    """What messages call the data sets."""
    embedded: Mapping[str, _Embedded]
    registered: dict[str, D]

    def names(self) -> list[str]:
        """All of them, for messages."""
        return [*self.embedded, *self.registered]

    def register(self, name: str, dataset: D) -> None:
        """Raise `UserError` where the name is taken by another data set."""
        if name in self.embedded or self.registered.get(name, dataset) != dataset:
            raise UserError(f"there is a {self.kind} called {name!r} already; register yours under another name")
        self.registered[name] = dataset

    def splits(self, dataset: str) -> tuple[str, ...]:
        """The splits of a dataset string, see `resolve_source`; local files are all one split, `train`."""
        if dataset in self.embedded:
            return tuple(self.embedded[dataset].items.n_default)
        return self.registered[dataset].splits if dataset in self.registered else local_splits(dataset)


DOCUMENTS: Catalog[HubDataset] = Catalog(
    "dataset",
    {"stories": _STORIES},
    {"c4": HubDataset(path="allenai/c4", name="en", splits=("train", "validation"))},
)
"""Data sets for pre-training."""

CHAT_DATASETS: Catalog[ChatDataset] = Catalog("chat dataset", {"chats": _CHATS, "stories": _STORIES}, {})
"""Data sets for fine-tuning."""


def register_dataset(name: str, dataset: HubDataset) -> None:
    """Make `--dataloader.dataset NAME` stream this data set in pre-training.

    Raises:
        UserError: the name is taken by another data set.
    """
    DOCUMENTS.register(name, dataset)


def register_chat_dataset(name: str, dataset: ChatDataset) -> None:
    """Make `--dataloader.dataset NAME` read this data set in fine-tuning.

    Raises:
        UserError: the name is taken by another data set.
    """
    CHAT_DATASETS.register(name, dataset)


class _EmbeddedPart(Part):
    def __init__(self, name: str, split: Any, embedded: _Embedded):
        super().__init__(f"{name} ({split})", embedded.column)
        self.version = embedded.version
        self.items = embedded.items(split)

    def size(self) -> int:
        return len(self.items)

    def contents(self, digest: Callable[[Path], str]) -> list[str]:
        return [self.name, self.version]

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        for number, item in enumerate(self.items, 1):
            yield Row(f"{self.name}, row {number}", {self.text_column: item})
            on_read(1)

    def documents(self, on_read: OnRead) -> Iterator[Document]:
        for item in self.items:
            yield (item,)
            on_read(1)


@dataclass(frozen=True, kw_only=True)
class StreamSource:
    """The documents of one split of a registered data set."""

    name: str
    dataset: HubDataset
    split: str
    text_column: str

    def open(self) -> Any:
        """A `datasets.IterableDataset` with the text column alone.

        Raises:
            UserError: the data set has no such column.
            Exception: whatever `datasets`, the hub's client, or the network raises; see `cannot_be_read`.
        """
        from datasets import load_dataset

        stream = load_dataset(self.dataset.path, self.dataset.name, split=self.split, streaming=True)
        columns = stream.column_names or list(next(iter(stream), {}))
        check_column(columns, self.text_column, f"dataset {self.name!r}")
        return stream.select_columns([self.text_column])

    def check(self) -> None:
        """Read one document, to find out early that none can be had; raises `UserError`."""
        try:
            first = next(iter(self.open()), None)
        except UserError:
            raise
        except Exception as error:  # of `open`
            raise UserError(f"{self.cannot_be_read(error)}; check the network, or give a local path") from error
        if first is None:
            raise UserError(f"dataset {self.name!r} has no documents in its split {self.split!r}")
        check_text(first[self.text_column], self.text_column, f"dataset {self.name!r}")

    def cannot_be_read(self, error: Exception) -> str:
        """A message of one line that names the data set and the cause, an error of `open` or of reading on."""
        return _cannot_be_read(self.name, self.dataset, self.split, error)


def _cannot_be_read(name: str, dataset: _Registered, split: str, error: Exception) -> str:
    place = f"{dataset.path}, {dataset.name}" if dataset.name else dataset.path
    return f"dataset {name!r} ({place}, split {split!r}) cannot be read: {first_line(error)}"


def _hub_table(name: str, dataset: ChatDataset, split: str) -> Table:
    """A repository on the Hugging Face hub, fetched when it is first asked for something."""

    def load() -> Any:
        from datasets import load_dataset

        try:
            # Not in memory, whatever the user's settings for small ones are: the files are what the rows are known by.
            return load_dataset(dataset.path, dataset.name, split=split, keep_in_memory=False)
        except Exception as error:  # of `datasets`, the hub's client, or the network
            message = _cannot_be_read(name, dataset, split, error)
            raise UserError(f"{message}; check the network, or give a local path") from error

    def files(table: Any) -> list[Path]:
        return [Path(file["filename"]) for file in table.cache_files]

    return Table(f"{name} ({split})", dataset.path, load, files)


def resolve_source(
    dataset: str,
    text_column: str | None = None,
    split: str = "train",
    catalog: Catalog[HubDataset] | Catalog[ChatDataset] = DOCUMENTS,
) -> Source | StreamSource:
    """The data that a dataset string names.

    Args:
        dataset: a name of the catalog, or a local path (`~` is the home folder): a file, a folder, which is searched
            for files of a known format, a glob pattern, or a folder written by `datasets.save_to_disk`. A name wins
            over a path of the same spelling; write `./stories` for the path.
        text_column: column that holds the text of a document; None: a registered data set's own, and `text` elsewhere.
        split: `train`, or another that the data set has.
        catalog: what the names are; a `StreamSource` comes of `DOCUMENTS` alone.

    Raises:
        UserError: there is no such data set, path, split, or reader for the file.
    """
    splits = catalog.splits(dataset)
    if split not in splits:
        raise UserError(f"dataset {dataset!r} has no split {split!r}; it has: {', '.join(splits)}")
    registered = catalog.registered.get(dataset)
    if isinstance(registered, HubDataset):
        column = text_column or registered.text_column
        return StreamSource(name=dataset, dataset=registered, split=split, text_column=column)
    parts: Sequence[Part]
    if dataset in catalog.embedded:
        parts = [_EmbeddedPart(dataset, split, catalog.embedded[dataset])]
    elif registered and registered.on_hub():
        parts = [_hub_table(dataset, registered, split)]
    else:
        path = registered.path.replace("{split}", split) if registered else dataset
        if registered and path == registered.path and split not in local_splits(path):
            raise UserError(f"dataset {dataset!r}: {path} has no split {split!r}; write {{split}} in its path")
        if folder := saved_dataset(path, split):
            parts = [saved_table(folder, text_column or "text")]
        else:
            files = local_files(path, catalog.names()).items()
            parts = [FilePart(shown, file, text_column or "text") for shown, file in files]
    return Source(dataset, parts, documents=catalog is DOCUMENTS)

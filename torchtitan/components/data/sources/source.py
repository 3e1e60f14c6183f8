"""Resolution of `--dataloader.dataset` to documents or rows.

Local data is a `Source`, which can be read repeatedly and is tokenized into a cache. A data set registered for
pre-training is a `StreamSource`, read during training.
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
"""Format that is recognized by the columns."""

RowFunction = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""Maps a row, its cells by column, to a row of a known format (`{"messages": […], "tools": […]}`, `{"text": …}`, …), or
to None to drop it."""


class Source:
    """Local data in a fixed order, as documents or as rows.

    Args:
        name: the configured name.
        parts: at least one.
        documents: whether it is read as documents rather than rows.
    """

    def __init__(self, name: str, parts: Sequence[Part], *, documents: bool):
        self.name = name
        self.parts = parts
        self._documents = documents

    def size(self) -> int:
        """Return the total that `on_read` adds up to: bytes or rows."""
        return sum(part.size() for part in self.parts)

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        """Yield the rows in order, without blank lines; raises `UserError` for an unreadable file."""
        for part in self.parts:
            for row in part.rows(on_read):
                if row.values is not None or row.error:
                    yield row

    def identity(self, digest: Callable[[Path], str]) -> list[str]:
        """Return the data's identity: equal lists mean equal documents, or equal rows at equal locations. `digest`
        returns the digest of a file's content."""
        contents = [part.contents(digest) for part in self.parts]
        if not self._documents:
            return [" ".join([part.name, *content]) for part, content in zip(self.parts, contents, strict=True)]
        first = self.parts[0]
        kind = [first.kind] if first.kind else []
        return [*kind, f"column {first.text_column}", *(item for content in contents for item in content)]


@dataclass(frozen=True, kw_only=True)
class _Registered:
    path: str
    """Hugging Face hub repository (`allenai/c4`) or local path: a folder of data files for pre-training, any
    `--dataloader.dataset` path for fine-tuning, in which `{split}` becomes the split."""
    name: str | None = None
    """Configuration of the repository, if it has several."""
    splits: tuple[str, ...] = ("train",)
    """Splits; `validation` serves as validation data."""


@dataclass(frozen=True, kw_only=True)
class HubDataset(_Registered):
    """Location of a data set for `datasets.load_dataset`."""

    text_column: str = "text"


@dataclass(frozen=True, kw_only=True)
class ChatDataset(_Registered):
    """Location of a data set and the format of its rows."""

    format: str = AUTO
    columns: Mapping[str, str] = field(default_factory=dict)
    """The format's column name → the data set's."""
    function: RowFunction | None = None
    """Maps a row to a row of a known format, or None to drop it; replaces `format` and `columns`."""

    def says_format(self) -> bool:
        """Return whether the registration decides how rows are read."""
        return self.function is not None or self.format != AUTO or bool(self.columns)

    def on_hub(self) -> bool:
        """Return whether `path` looks like a repository, and is neither a data file nor a local path."""
        is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.path) is not None
        return is_name and file_format(Path(self.path)) is None and not Path(self.path).exists()


class _Embedded(NamedTuple):
    items: type[Generated[Any]]
    version: str
    column: str


_STORIES = _Embedded(stories.Stories, stories.VERSION, "text")
_CHATS = _Embedded(chats.Chats, chats.VERSION, "messages")

D = TypeVar("D", HubDataset, ChatDataset)


@dataclass
class Catalog(Generic[D]):
    """Names of data sets for the loaders of one kind."""

    kind: str
    """Term used in messages."""
    embedded: Mapping[str, _Embedded]
    registered: dict[str, D]

    def names(self) -> list[str]:
        return [*self.embedded, *self.registered]

    def register(self, name: str, dataset: D) -> None:
        """Register a data set; raises `UserError` if another has the name."""
        if name in self.embedded or self.registered.get(name, dataset) != dataset:
            raise UserError(f"there is a {self.kind} called {name!r} already; register yours under another name")
        self.registered[name] = dataset

    def splits(self, dataset: str) -> tuple[str, ...]:
        """Return the splits of a dataset string, see `resolve_source`."""
        if dataset in self.embedded:
            return tuple(self.embedded[dataset].items.n_default)
        return self.registered[dataset].splits if dataset in self.registered else local_splits(dataset)


DOCUMENTS: Catalog[HubDataset] = Catalog(
    "dataset",
    {"stories": _STORIES},
    {"c4": HubDataset(path="allenai/c4", name="en", splits=("train", "validation"))},
)

CHAT_DATASETS: Catalog[ChatDataset] = Catalog("chat dataset", {"chats": _CHATS, "stories": _STORIES}, {})


def register_dataset(name: str, dataset: HubDataset) -> None:
    """Make `--dataloader.dataset NAME` stream this data set in pre-training; raises `UserError` for a taken name."""
    DOCUMENTS.register(name, dataset)


def register_chat_dataset(name: str, dataset: ChatDataset) -> None:
    """Make `--dataloader.dataset NAME` read this data set in fine-tuning; raises `UserError` for a taken name."""
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
    """Documents of one split of a registered data set."""

    name: str
    dataset: HubDataset
    split: str
    text_column: str

    def open(self) -> Any:
        """Return a `datasets.IterableDataset` of the text column.

        Raises:
            UserError: the data set has no such column.
            Exception: any error of `datasets`, the hub's client or the network; see `cannot_be_read`.
        """
        from datasets import load_dataset

        stream = load_dataset(self.dataset.path, self.dataset.name, split=self.split, streaming=True)
        columns = stream.column_names or list(next(iter(stream), {}))
        check_column(columns, self.text_column, f"dataset {self.name!r}")
        return stream.select_columns([self.text_column])

    def check(self) -> None:
        """Read one document, to fail early; raises `UserError`."""
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
        """Return a one-line message that names the data set and the cause, an error of `open` or of iteration."""
        return _cannot_be_read(self.name, self.dataset, self.split, error)


def _cannot_be_read(name: str, dataset: _Registered, split: str, error: Exception) -> str:
    place = f"{dataset.path}, {dataset.name}" if dataset.name else dataset.path
    return f"dataset {name!r} ({place}, split {split!r}) cannot be read: {first_line(error)}"


def _hub_table(name: str, dataset: ChatDataset, split: str) -> Table:
    """Return a table of a Hugging Face hub repository, downloaded on first use."""

    def load() -> Any:
        from datasets import load_dataset

        try:
            # Not in memory, whatever the user's settings: the files identify the rows.
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
    """Return the data that a dataset string names.

    Args:
        dataset: a name of the catalog, or a local path (`~` is the home folder): a file, a folder to search for files
            of a known format, a glob pattern, or a folder written by `datasets.save_to_disk`. A name takes precedence
            over a path; write `./stories` for the path.
        text_column: column with a document's text; None: a registered data set's own, otherwise `text`.
        split: `train`, or another split of the data set.
        catalog: known names; only `DOCUMENTS` gives a `StreamSource`.

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

"""Resolution of `--dataloader.dataset` to documents or rows.

Local data is a `Source`, which is tokenized into a cache before training. A dataset registered for
pre-training is a `StreamSource`, which is read during training.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from torchtitan.assets import chats, stories
from torchtitan.assets.generated import Generated
from torchtitan.components.data.sources.files import FilePart, file_format
from torchtitan.components.data.sources.hub_names import (
    HubName,
    check_revision,
    commit_of,
    hub_name,
    reject_page,
)
from torchtitan.components.data.sources.paths import (
    local_files,
    local_splits,
    saved_dataset,
    searched_folder,
)
from torchtitan.components.data.sources.rows import (
    Document,
    OnRead,
    Part,
    Row,
    check_column,
    check_text,
    first_line,
)
from torchtitan.components.data.sources.stored import stored_files
from torchtitan.components.data.sources.tables import Table, saved_table
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import is_url
from torchtitan.tools.logging import logger
from torchtitan.tools.redact import redact

if TYPE_CHECKING:
    import datasets

AUTO = "auto"
"""Name of automatic format detection from the columns."""

RowFunction = Callable[[dict[str, Any]], Mapping[str, object] | None]
"""Maps a row (column → cell) to a row of a known format (`{"messages": […]}`, `{"text": …}`, …), or
to None to drop it."""


class LocalData:
    """Data without commits, see `StreamedSet`."""

    commit = ""

    def pinned(self, commit: str | None = None) -> Self:
        return self

    def resumed(self, commit: str) -> Self:
        return self


class Source(LocalData):
    """Local data in a fixed order, as documents or as rows.

    Args:
        name: configured name; its credentials are removed.
        parts: at least one part, if it is read.
        documents: whether to read documents instead of rows.
    """

    def __init__(self, name: str, parts: Sequence[Part], *, documents: bool):
        self.name = redact(name)
        self.parts = parts
        self._documents = documents

    def with_parts(self, parts: Sequence[Part]) -> "Source":
        """Return a source with other parts that is read in the same way."""
        return Source(self.name, parts, documents=self._documents)

    def size(self) -> int:
        """Return the sum of all `on_read` calls: bytes or rows."""
        return sum(part.size() for part in self.parts)

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        """Yield the rows in order, without blank lines. Raise `UserError` for an unreadable
        file."""
        for part in self.parts:
            for row in part.rows(on_read):
                if row.values is not None or row.error:
                    yield row

    def documents(self) -> Iterator[Document]:
        """Yield the documents in order; consume each before the next. Raise `UserError` for an
        unreadable file."""
        for part in self.parts:
            yield from part.documents(lambda _: None)

    def n_bytes(self) -> int:
        """Return the bytes of the data as it is stored."""
        return sum(part.n_bytes() for part in self.parts)

    def identity(self, digest: Callable[[Path], str]) -> list[str]:
        """Return the identity of the data: equal lists mean equal documents, or equal rows at equal
        locations. `digest` returns the digest of a file's content."""
        contents = [part.contents(digest) for part in self.parts]
        if not self._documents:
            return [
                " ".join([part.name, *content])
                for part, content in zip(self.parts, contents, strict=True)
            ]
        first = self.parts[0]
        kind = [first.kind] if first.kind else []
        return [
            *kind,
            f"column {first.text_column}",
            *(item for content in contents for item in content),
        ]


@dataclass(frozen=True, kw_only=True)
class _Registered:
    path: str
    """Hugging Face Hub repository (`allenai/c4`) or local path: a folder of data files for
    pre-training, any `--dataloader.dataset` path for fine-tuning, with `{split}` as placeholder for
    the split."""
    name: str | None = None
    """Configuration of the repository, if it has more than one."""
    splits: tuple[str, ...] = ("train",)
    """Splits; `validation` is used for validation."""
    revision: str | None = None
    """Branch, tag or commit of the repository. None: the newest commit."""


@dataclass(frozen=True, kw_only=True)
class HubDataset(_Registered):
    """Location of a dataset for `datasets.load_dataset`."""

    text_column: str = "text"


@dataclass(frozen=True, kw_only=True)
class ChatDataset(_Registered):
    """Location of a dataset and the format of its rows."""

    format: str = AUTO
    columns: Mapping[str, str] = field(default_factory=dict)
    """Format's column name → column name in the dataset."""
    function: RowFunction | None = None
    """Maps a row to a row of a known format, or None to drop it; replaces `format` and
    `columns`."""

    def has_format(self) -> bool:
        """Return whether the registration specifies the row format."""
        return self.function is not None or self.format != AUTO or bool(self.columns)

    def on_hub(self) -> bool:
        """Return whether `path` is a valid repository name, and neither a data file nor a local
        path."""
        is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.path) is not None
        return is_name and file_format(Path(self.path)) is None and not Path(self.path).exists()


class _Embedded(NamedTuple):
    items: type[Generated[Any]]
    version: str
    column: str


_STORIES = _Embedded(stories.Stories, stories.VERSION, "text")
_CHATS = _Embedded(chats.Chats, chats.VERSION, "messages")
_PREFERENCES = _Embedded(chats.Preferences, chats.VERSION, "")

D = TypeVar("D", HubDataset, ChatDataset)

SIZED_FILES = 16
"""Number of files whose sizes serve to estimate the size of a stream."""


@dataclass
class Catalog(Generic[D]):
    """Registered and embedded datasets for one kind of loader."""

    kind: str
    """Term used in messages."""
    embedded: Mapping[str, _Embedded]
    registered: dict[str, D]

    def names(self) -> list[str]:
        return [*self.embedded, *self.registered]

    def register(self, name: str, dataset: D) -> None:
        """Register a dataset. Raise `UserError` if the name is taken."""
        if name in self.embedded or self.registered.get(name, dataset) != dataset:
            raise UserError(f"the {self.kind} {name!r} is already registered; use another name")
        self.registered[name] = dataset

    def splits(self, dataset: str) -> tuple[str, ...]:
        """Return the splits of a dataset string; see `resolve_source`."""
        if dataset in self.embedded:
            return tuple(self.embedded[dataset].items.n_default)
        return (
            self.registered[dataset].splits if dataset in self.registered else local_splits(dataset)
        )


AnyCatalog = Catalog[HubDataset] | Catalog[ChatDataset]

DOCUMENTS: Catalog[HubDataset] = Catalog(
    "dataset",
    {"stories": _STORIES},
    {"c4": HubDataset(path="allenai/c4", name="en", splits=("train", "validation"))},
)

CHAT_DATASETS: Catalog[ChatDataset] = Catalog(
    "chat dataset", {"chats": _CHATS, "stories": _STORIES, "preferences": _PREFERENCES}, {}
)


def register_dataset(name: str, dataset: HubDataset) -> None:
    """Register a dataset to stream in pre-training, `--dataloader.dataset NAME`. Raise `UserError`
    for a taken name."""
    DOCUMENTS.register(name, dataset)


def register_chat_dataset(name: str, dataset: ChatDataset) -> None:
    """Register a dataset for fine-tuning with `--dataloader.dataset NAME`. Raise `UserError` for a
    taken name."""
    CHAT_DATASETS.register(name, dataset)


class _EmbeddedPart(Part):
    counts_bytes = False

    def __init__(self, name: str, split: str, embedded: _Embedded):
        super().__init__(f"{name} ({split})", embedded.column)
        self.version = embedded.version
        self.items = embedded.items("validation" if split == "validation" else "train")

    def size(self) -> int:
        return len(self.items)

    def n_bytes(self) -> int:
        return sum(len(json.dumps(item)) for item in self.items)

    def contents(self, digest: Callable[[Path], str]) -> list[str]:
        return [self.name, self.version]

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        for number, item in enumerate(self.items, 1):
            yield Row(
                f"{self.name}, row {number}", {self.text_column: item} if self.text_column else item
            )
            on_read(1)

    def documents(self, on_read: OnRead) -> Iterator[Document]:
        for item in self.items:
            yield (item,)
            on_read(1)


@dataclass(frozen=True, kw_only=True)
class StreamSource:
    """Documents or rows of one split of a dataset on the hub."""

    name: str
    dataset: HubDataset | ChatDataset
    split: str
    text_column: str = ""
    """Column of the documents; empty: rows are read."""
    commit: str = ""
    """Commit that is read; empty: the newest one of the dataset's revision."""

    def pinned(self, commit: str | None = None) -> Self:
        """Return the stream at a commit; None: the newest one of its revision, if it is on the hub
        and the hub answers."""
        if commit is None:
            is_local = Path(self.dataset.path).exists()
            commit = "" if is_local else commit_of(self.dataset.path, self.dataset.revision)
            if not (is_local or commit):
                logger.warning(
                    "%s: the hub does not name the commit that is read: a run that resumes after a "
                    "push reads other rows",
                    self.name,
                )
        return replace(self, commit=commit)

    def resumed(self, commit: str) -> Self:
        """Return the stream at the commit of a saved position, and say if it is not the newest."""
        if commit in ("", self.commit):  # "": the hub did not answer
            return self
        if self.commit:
            logger.warning(
                f"{self.name} has changed on the hub since the run began; it continues to read "
                f"commit {commit}, and the newest is {self.commit}"
            )
        return self.pinned(commit)

    @property
    def key(self) -> list[str | None]:
        """Names that are equal for the same data."""
        revision = [self.dataset.revision] if self.dataset.revision else []
        return [self.dataset.path, self.dataset.name, self.split, self.text_column, *revision]

    def open(self) -> "datasets.IterableDataset":
        """Return the text column.

        Raises:
            UserError: the text column does not exist.
            Exception: any error of `datasets`, the Hub client or the network; see `read_failure`.
        """
        stream = self._load()
        columns = stream.column_names or list(next(iter(stream), {}))
        check_column(columns, self.text_column, f"dataset {self.name!r}")
        return stream.select_columns([self.text_column])

    def open_rows(self) -> "datasets.IterableDataset":
        """Return all columns, with images as they are stored. Raise the errors of `open`, except
        that no column is needed."""
        stream = self._load()
        return stream if stream.features is None else stream.decode(False)

    def open_tables(self) -> "datasets.IterableDataset":
        """Return all columns, in batches that are Arrow tables, for `arrow_rows`. Raise the errors
        of `open`, except that no column is needed."""
        return self._load().with_format("arrow")

    def _load(self) -> "datasets.IterableDataset":
        from datasets import load_dataset

        return load_dataset(
            self.dataset.path,
            self.dataset.name,
            split=self.split,
            streaming=True,
            revision=self._revision,
        )

    @property
    def _revision(self) -> str | None:
        return self.commit or self.dataset.revision

    def n_bytes(self) -> int:
        """Return the bytes of the files, estimated from `SIZED_FILES` of them. Raise `UserError` if
        they cannot be asked for."""
        import fsspec
        from datasets import load_dataset_builder

        try:
            dataset = self.dataset
            builder = load_dataset_builder(dataset.path, dataset.name, revision=self._revision)
            files = (builder.config.data_files or {})[self.split]
            some = files[:: -(-len(files) // SIZED_FILES)]
            sizes = [system.size(path) for system, path in map(fsspec.url_to_fs, some)]
        except Exception as error:  # of `open`
            raise UserError(
                f"the size of a stream is unknown: {self.read_failure(error)}; check the network, "
                "give the share of each dataset (--dataloader.weights), or copy the data "
                "(--dataloader.stream none)"
            ) from error
        return sum(sizes) * len(files) // len(some)

    def check(self) -> None:
        """Read one document to detect problems early. Raise `UserError`."""
        first = self.first_row(self.open)
        check_text(first[self.text_column], self.text_column, f"dataset {self.name!r}")

    def first_row(self, open_stream: "Callable[[], datasets.IterableDataset]") -> dict[str, object]:
        """Return the first row of `open` or `open_rows`. Raise `UserError` if the row cannot be
        read or does not exist."""
        try:
            first: dict[str, object] | None = next(iter(open_stream()), None)
        except UserError:
            raise
        except Exception as error:  # of `open`
            raise UserError(
                f"{self.read_failure(error)}; check the network, or use a local path"
            ) from error
        if first is None:
            raise UserError(f"dataset {self.name!r} has no documents in its split {self.split!r}")
        return first

    def read_failure(self, error: Exception) -> str:
        """Return a one-line message with the dataset and the cause, an error of `open` or of
        iteration."""
        return _read_failure(self.name, self.dataset, self.split, error)


def _read_failure(name: str, dataset: _Registered, split: str, error: Exception) -> str:
    repository = f"{dataset.path}, {dataset.name}" if dataset.name else dataset.path
    return f"dataset {name!r} ({repository}, split {split!r}) cannot be read: {first_line(error)}"


def _hub_table(name: str, dataset: ChatDataset | HubDataset, split: str, text_column: str) -> Table:
    """Return a table of a Hugging Face Hub repository, downloaded on first use."""

    def load() -> "datasets.Dataset":
        from datasets import load_dataset

        try:
            # `keep_in_memory` must be False, because the files identify the rows.
            table = load_dataset(
                dataset.path,
                dataset.name,
                split=split,
                keep_in_memory=False,
                revision=dataset.revision,
            )
        except Exception as error:  # of `datasets`, the Hub client, or the network
            message = _read_failure(name, dataset, split, error)
            raise UserError(f"{message}; check the network, or use a local path") from error
        check_revision(dataset.path, dataset.revision, table)
        return table

    def files(table: "datasets.Dataset") -> list[Path]:
        return [Path(file["filename"]) for file in table.cache_files]

    return Table(f"{name} ({split})", dataset.path, load, files, text_column)


def _on_hub(name: HubName, is_pretraining: bool) -> HubDataset | ChatDataset:
    kind = HubDataset if is_pretraining else ChatDataset
    return kind(path=name.repository, name=name.config, revision=name.revision)


def hub_repositories(datasets: Iterable[str]) -> list[str]:
    """Return the repositories on the hub among dataset strings. Registered names and local paths
    (see `hub_name`) are omitted."""
    registered = {*DOCUMENTS.registered, *CHAT_DATASETS.registered}
    named = [hub_name(dataset) for dataset in datasets if dataset not in registered]
    return list(dict.fromkeys(name.repository for name in named if name))


def resolve_rows(dataset: str, split: str = "train") -> Source | StreamSource:
    """Return the rows of a fine-tuning dataset: a stream if it is on the hub, otherwise as by
    `resolve_source`, with the same errors."""
    registered = CHAT_DATASETS.registered.get(dataset)
    if registered is None and dataset not in CHAT_DATASETS.embedded:
        if named := hub_name(dataset):
            return StreamSource(name=dataset, dataset=_on_hub(named, False), split=named.split)
    elif registered and registered.on_hub() and split in registered.splits:
        return StreamSource(name=dataset, dataset=registered, split=split)
    return resolve_source(dataset, split=split, catalog=CHAT_DATASETS)


def resolve_source(
    dataset: str,
    text_column: str | None = None,
    split: str = "train",
    catalog: AnyCatalog = DOCUMENTS,
    copied: bool = False,
) -> Source | StreamSource:
    """Return the data of a dataset string. Raise `UserError` if the dataset, path or split does not
    exist, or the file format is not supported.

    Args:
        dataset: name in the catalog, local path (`~` is the home folder) or URL (s3://…): a file, a
            folder to search for files of known formats, a glob pattern, or a local folder written
            by `datasets.save_to_disk`; or a repository on the hub, `hub_name`. Names take
            precedence over paths, and paths over the hub; write `./stories` for the path.
        text_column: column with a document's text; None: the registered dataset's column, else
            `text`.
        split: `train`, or another split of the dataset.
        catalog: known names; only `DOCUMENTS` contains streams.
        copied: copy a repository on the hub instead of streaming it.
    """
    splits = catalog.splits(dataset)
    if split not in splits:
        raise UserError(
            f"dataset {dataset!r} has no split {split!r}; use one of: {', '.join(splits)}"
        )
    registered = catalog.registered.get(dataset)
    parts: Sequence[Part]
    if registered is None and dataset not in catalog.embedded and (named := hub_name(dataset)):
        registered, split = _on_hub(named, catalog is DOCUMENTS), named.split
        if copied:
            parts = [_hub_table(dataset, registered, split, text_column or "text")]
            return Source(dataset, parts, documents=catalog is DOCUMENTS)
    if isinstance(registered, HubDataset):
        column = text_column or registered.text_column
        return StreamSource(name=dataset, dataset=registered, split=split, text_column=column)
    if dataset in catalog.embedded:
        parts = [_EmbeddedPart(dataset, split, catalog.embedded[dataset])]
    elif registered and registered.on_hub():
        parts = [_hub_table(dataset, registered, split, "text")]
    else:
        path = registered.path.replace("{split}", split) if registered else dataset
        if registered and path == registered.path and split not in local_splits(path):
            raise UserError(
                f"dataset {dataset!r}: {path} has no split {split!r}; use {{split}} in its path"
            )
        if folder := saved_dataset(path, split):
            parts = [saved_table(folder, text_column or "text")]
        elif is_url(path):
            reject_page(path)
            parts = stored_files(path, text_column or "text")
        else:
            files = local_files(path, catalog.names()).items()
            top = searched_folder(path)
            parts = [FilePart(shown, file, text_column or "text", top) for shown, file in files]
    return Source(dataset, parts, documents=catalog is DOCUMENTS)

"""Names for chat data sets, which `--dataloader.dataset` then takes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.components.data.finetuning.row_formats import AUTO, Kind, RowFormat, find_format, function_format
from torchtitan.components.data.finetuning.row_functions import RowFunction
from torchtitan.components.data.readers import file_format
from torchtitan.tools.errors import UserError

EMBEDDED = ("chats", "stories")
"""The data sets that come with this package."""


@dataclass(frozen=True, kw_only=True)
class ChatDataset:
    """Where a data set is, and how its rows are read."""

    path: str
    """A local path (as `--dataloader.dataset` takes it; `{split}` in it becomes the split), or a repository on the
    Hugging Face hub (`HuggingFaceH4/ultrachat_200k`)."""
    name: str | None = None
    """The configuration of the repository, if it has several."""
    splits: tuple[str, ...] = ("train",)
    """Its splits; one called `validation` serves as the validation data."""
    format: str = "auto"
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


_registry: dict[str, ChatDataset] = {}


def register_chat_dataset(name: str, dataset: ChatDataset) -> None:
    """Make `--dataloader.dataset NAME` read this data set.

    Raises:
        UserError: the name is taken by another data set.
    """
    if name in EMBEDDED or _registry.get(name, dataset) != dataset:
        raise UserError(f"there is a chat dataset called {name!r} already; register yours under another name")
    _registry[name] = dataset


def registered_chat_datasets() -> dict[str, ChatDataset]:
    """The registered data sets by name."""
    return dict(_registry)


def dataset_formats(
    datasets: Sequence[str],
    columns: Sequence[Sequence[str]],
    format: str,
    mapping: Mapping[str, str],
    kind: Kind,
) -> list[RowFormat]:
    """The formats of the rows of dataset strings, by the columns of each.

    `format` (other than "auto") and `mapping` are those of the data sets that they fit, and go before what was
    registered; the others are read as they are registered, or by their columns. A function fits all but those that are
    registered with a way to be read.

    Raises:
        UserError: as `find_format`, and where they fit none.
    """
    if format == AUTO and not mapping:
        return [_own_format(dataset, of_set, kind) for dataset, of_set in zip(datasets, columns, strict=True)]
    formats: list[RowFormat | None] = []
    errors = []
    for dataset, of_set in zip(datasets, columns, strict=True):
        try:
            formats.append(_described_format(dataset, of_set, format, mapping, kind))
        except UserError as error:
            errors.append(error)
            formats.append(None)
    if not any(formats):
        raise errors[0]
    own = zip(datasets, columns, formats, strict=True)
    return [described or _own_format(dataset, of_set, kind) for dataset, of_set, described in own]


def describes(dataset: str, columns: Sequence[str], format: str, mapping: Mapping[str, str], kind: Kind) -> bool:
    """Whether `format` and `mapping` fit a data set with these columns, see `dataset_formats`."""
    try:
        _described_format(dataset, columns, format, mapping, kind)
    except UserError:
        return False
    return True


def _described_format(
    dataset: str, columns: Sequence[str], format: str, mapping: Mapping[str, str], kind: Kind
) -> RowFormat:
    registered = _registry.get(dataset)
    if ":" in format and registered is not None and registered.says_format():
        raise UserError(f"--dataloader.format {format!r}: {dataset!r} is registered with a way to be read of its own")
    return find_format(columns, format, mapping, kind)


def _own_format(dataset: str, columns: Sequence[str], kind: Kind) -> RowFormat:
    registered = _registry.get(dataset)
    if registered is None:
        return find_format(columns, AUTO, {}, kind)
    if registered.function is not None:
        return function_format(registered.function, kind)
    return find_format(columns, registered.format, registered.columns, kind)

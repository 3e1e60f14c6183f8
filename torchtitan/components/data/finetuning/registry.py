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


def dataset_format(
    dataset: str, columns: Sequence[str], format: str, mapping: Mapping[str, str], kind: Kind
) -> RowFormat:
    """The format of the rows of a dataset string: `find_format`, unless it is a registered one and says so itself.

    `format` (other than "auto") and `mapping` go before what was registered.

    Raises:
        UserError: as `find_format`.
    """
    registered = _registry.get(dataset)
    if registered is None or format != AUTO or mapping:
        return find_format(columns, format, mapping, kind)
    if registered.function is not None:
        return function_format(registered.function, kind)
    return find_format(columns, registered.format, registered.columns, kind)

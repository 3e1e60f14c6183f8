"""Registered data sets: names for what is read by streaming, through the library `datasets`."""

from dataclasses import dataclass
from typing import Any

from torchtitan.components.data.readers import check_column, check_text, first_line
from torchtitan.tools.errors import UserError


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """Where `datasets.load_dataset` finds a data set."""

    path: str
    """A repository on the Hugging Face hub (`allenai/c4`), or a local folder of data files."""
    name: str | None = None
    """The configuration of the repository, if it has several."""
    splits: tuple[str, ...] = ("train",)
    """Its splits; one called `validation` serves as the validation data."""
    text_column: str = "text"
    """The column that holds the text."""


_registry: dict[str, HubDataset] = {
    "c4": HubDataset(path="allenai/c4", name="en", splits=("train", "validation")),
}


def register_dataset(name: str, dataset: HubDataset) -> None:
    """Make `--dataloader.dataset NAME` stream this data set.

    Raises:
        UserError: the name is taken by another data set.
    """
    if name == "stories" or _registry.get(name, dataset) != dataset:
        raise UserError(f"there is a dataset called {name!r} already; register yours under another name")
    _registry[name] = dataset


def registered_datasets() -> dict[str, HubDataset]:
    """The registered data sets by name."""
    return dict(_registry)


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
        return cannot_be_read(self.name, self.dataset.path, self.dataset.name, self.split, error)


def cannot_be_read(name: str, path: str, configuration: str | None, split: str, error: Exception) -> str:
    """A message of one line that names the data set `name`, the repository it is in, and the cause."""
    cause = first_line(error)
    place = f"{path}, {configuration}" if configuration else path
    return f"dataset {name!r} ({place}, split {split!r}) cannot be read: {cause}"

"""Tables of the library `datasets`: folders that it saved, and repositories that it fetched."""

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.components.data.readers import OnRead, Row, check_column, without_filled_in
from torchtitan.tools.errors import UserError

BATCH_SIZE = 256
"""Rows read at a time."""


class Table:
    """A map-style `datasets.Dataset`, loaded when it is first asked for something.

    Args:
        place: where it is, for messages.
        load: gives the data set.
        files: gives the files that decide what is in it.
    """

    def __init__(self, place: str, load: Callable[[], Any], files: Callable[[Any], list[Path]]):
        self._place = place
        self._load = load
        self._files = files

    @cached_property
    def _dataset(self) -> Any:
        return self._load().with_format(None)

    def __len__(self) -> int:
        return len(self._dataset)

    def files(self) -> list[Path]:
        """The files that decide what is in the table."""
        return self._files(self._dataset)

    def rows(self, name: str, on_read: OnRead, column: str | None = None) -> Iterator[Row]:
        """The rows in their order; `on_read` is told of each.

        Args:
            name: what the rows' places call the table.
            on_read: told how many more rows have been read.
            column: the only one that is wanted.

        Raises:
            UserError: there is no such column, or a file cannot be read.
        """
        dataset = self._dataset
        if column is not None:
            check_column(dataset.column_names, column, name)
            dataset = dataset.select_columns([column])
        # As Arrow has them: images and sounds, which no format reads, are not decoded.
        batches, number = iter(dataset.with_format("arrow").iter(batch_size=BATCH_SIZE)), 0
        while (batch := self._next(batches)) is not None:
            for values in batch.to_pylist():
                number += 1
                yield Row(number, f"{name}, row {number}", without_filled_in(values, batch.schema))
                on_read(1)

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches, None)
        except (OSError, ValueError) as error:
            raise _cannot_be_read(self._place, error) from error


def saved_table(folder: Path) -> Table:
    """The table in a folder that `datasets.Dataset.save_to_disk` wrote; what is asked of it raises `UserError` if it
    cannot be read."""

    def load() -> Any:
        from datasets import load_from_disk

        try:
            return load_from_disk(folder)
        except (OSError, ValueError, KeyError) as error:
            raise _cannot_be_read(str(folder), error) from error

    return Table(str(folder), load, lambda dataset: sorted(path for path in folder.iterdir() if path.is_file()))


def hub_table(path: str, name: str | None, split: str) -> Table:
    """The table that `datasets.load_dataset` gives for a repository on the Hugging Face hub, fetched if need be.

    What it raises comes from whatever is asked of the table first: anything that `datasets`, the hub's client, or the
    network does.
    """

    def load() -> Any:
        from datasets import load_dataset

        # Not in memory, whatever the user's settings for small ones are: the files are what the rows are known by.
        return load_dataset(path, name, split=split, keep_in_memory=False)

    return Table(path, load, lambda dataset: [Path(file["filename"]) for file in dataset.cache_files])


def _cannot_be_read(place: str, error: Exception) -> UserError:
    return UserError(f"the data set saved in {place} cannot be read ({error}); save it again")

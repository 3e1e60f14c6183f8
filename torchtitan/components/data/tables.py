"""Tables of the library `datasets`: folders that it saved, and repositories that it fetched."""

import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.components.data.readers import OnRead, Row, arrow_rows, check_column, first_line, regular_file
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
        batches, n_read = iter(dataset.with_format("arrow").iter(batch_size=BATCH_SIZE)), 0
        while (batch := self._next(batches)) is not None:
            for row in arrow_rows(batch, name, n_read + 1):
                yield row
                on_read(1)
            n_read += len(batch)

    def _next(self, batches: Iterator[Any]) -> Any:
        """Return the next batch. It is validated: the files are mapped into memory as they are, and damaged offsets
        would have Arrow read beyond them."""
        try:
            if (batch := next(batches, None)) is not None:
                batch.validate(full=True)
            return batch
        except Exception as error:  # of `datasets` or pyarrow, at any damage
            raise _cannot_be_read(self._place, error) from error


def saved_table(folder: Path) -> Table:
    """The table in a folder that `datasets.Dataset.save_to_disk` wrote; what is asked of it raises `UserError` if it
    cannot be read."""

    def load() -> Any:
        from datasets import load_from_disk

        try:
            for path in folder.iterdir():
                if not path.is_dir():
                    regular_file(path)
            _check_names(folder)
            return load_from_disk(folder)
        except UserError:
            raise
        except Exception as error:  # of `datasets` or pyarrow, at any damage
            raise _cannot_be_read(str(folder), error) from error

    return Table(str(folder), load, lambda dataset: sorted(path for path in folder.iterdir() if path.is_file()))


def _check_names(folder: Path) -> None:
    """Refuse a saved data set whose description names a file that is not in its folder."""
    state = folder / "state.json"
    files = {path.name for path in folder.iterdir() if path.is_file()}
    for data_file in json.loads(state.read_bytes())["_data_files"]:
        if (name := data_file["filename"]) not in files:
            raise UserError(f"{state} names {name!r}, which is not a file in its folder; save the data set again")


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
    return UserError(f"the data set saved in {place} cannot be read ({first_line(error)}); save it again")

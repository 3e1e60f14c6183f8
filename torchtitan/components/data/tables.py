"""Tables of the library `datasets`: folders that it saved, and repositories that it fetched."""

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.components.data.readers import OnRead, Row, check_column, without_filled_in

BATCH_SIZE = 256
"""Rows read at a time."""


class Table:
    """A map-style `datasets.Dataset`, loaded when it is first asked for something.

    Args:
        load: gives the data set.
        files: gives the files that decide what is in it.
    """

    def __init__(self, load: Callable[[], Any], files: Callable[[Any], list[Path]]):
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
            UserError: there is no such column.
        """
        dataset = self._dataset
        if column is not None:
            check_column(dataset.column_names, column, name)
            dataset = dataset.select_columns([column])
        schema, number = dataset.features.arrow_schema, 0
        for batch in dataset.iter(batch_size=BATCH_SIZE):
            for cells in zip(*batch.values(), strict=True):
                number += 1
                values = without_filled_in(dict(zip(batch, cells, strict=True)), schema)
                yield Row(number, f"{name}, row {number}", values)
                on_read(1)


def saved_table(folder: Path) -> Table:
    """The table in a folder that `datasets.Dataset.save_to_disk` wrote."""

    def load() -> Any:
        from datasets import load_from_disk

        return load_from_disk(folder)

    return Table(load, lambda dataset: sorted(path for path in folder.iterdir() if path.is_file()))


def hub_table(path: str, name: str | None, split: str) -> Table:
    """The table that `datasets.load_dataset` gives for a repository on the Hugging Face hub, fetched if need be.

    What it raises comes from whatever is asked of the table first: anything that `datasets`, the hub's client, or the
    network does.
    """

    def load() -> Any:
        from datasets import load_dataset

        # Not in memory, whatever the user's settings for small ones are: the files are what the rows are known by.
        return load_dataset(path, name, split=split, keep_in_memory=False)

    return Table(load, lambda dataset: [Path(file["filename"]) for file in dataset.cache_files])

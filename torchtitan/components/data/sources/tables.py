"""Arrow tables: rows of record batches, and datasets of the library `datasets`."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.components.data.sources.cells import CellReader, cell_readers
from torchtitan.components.data.sources.rows import (
    Document,
    OnRead,
    Part,
    Row,
    check_column,
    first_line,
    text_of,
)
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import named_file, read_regular

if TYPE_CHECKING:
    import datasets
    import pyarrow

BATCH_SIZE = 256


class Table(Part):
    """A map-style `datasets.Dataset`, loaded on first use.

    Args:
        name: prefix of the rows' locations.
        location: location for error messages.
        load: returns the dataset.
        files: returns the files that determine its content.
        text_column: see `Part`.
        folder: see `Part`.
    """

    kind = "datasets"
    counts_bytes = False

    def __init__(
        self,
        name: str,
        location: str,
        load: "Callable[[], datasets.Dataset]",
        files: "Callable[[datasets.Dataset], list[Path]]",
        text_column: str = "text",
        folder: Path | None = None,
    ):
        super().__init__(name, text_column)
        self.folder = folder
        self._location = location
        self._load = load
        self._files = files

    @cached_property
    def _dataset(self) -> "datasets.Dataset":
        return self._load().with_format(None)

    def size(self) -> int:
        return len(self._dataset)

    def n_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files(self._dataset))

    def contents(self, digest: Callable[[Path], str]) -> list[str]:
        return [digest(path) for path in self._files(self._dataset)]

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        return self._rows(self._dataset, self.name, on_read)

    def documents(self, on_read: OnRead) -> Iterator[Document]:
        check_column(self._dataset.column_names, self.text_column, self._location)
        for row in self._rows(
            self._dataset.select_columns([self.text_column]), self._location, on_read
        ):
            yield text_of(row, self.text_column)

    def _rows(self, dataset: "datasets.Dataset", name: str, on_read: OnRead) -> Iterator[Row]:
        # As Arrow data, so that images and audio, which no format uses, are not decoded.
        batches, n_read = iter(dataset.with_format("arrow").iter(batch_size=BATCH_SIZE)), 0
        features = dataset.features.arrow_schema.metadata
        while (batch := self._next(batches)) is not None:
            for row in arrow_rows(batch.replace_schema_metadata(features), name, n_read + 1):
                yield row
                on_read(1)
            n_read += len(batch)

    def _next(self, batches: "Iterator[pyarrow.Table]") -> "pyarrow.Table | None":
        """Return the next batch, validated, since damaged offsets in files would make Arrow read
        out of bounds."""
        try:
            if (batch := next(batches, None)) is not None:
                batch.validate(full=True)
            return batch
        except Exception as error:  # damage may cause any error in `datasets` or pyarrow
            raise _read_error(self._location, error) from error


def saved_table(folder: Path, text_column: str) -> Table:
    """Return the table written by `datasets.Dataset.save_to_disk`. Using a damaged table raises
    `UserError`."""

    def load() -> "datasets.Dataset":
        from datasets import load_from_disk

        try:
            for path in folder.iterdir():
                if not path.is_dir():
                    named_file(folder, path.name, str(folder))
            _check_names(folder)
            return load_from_disk(folder)
        except UserError:
            raise
        except Exception as error:  # damage may cause any error in `datasets` or pyarrow
            raise _read_error(str(folder), error) from error

    def files(dataset: "datasets.Dataset") -> list[Path]:
        return sorted(path for path in folder.iterdir() if path.is_file())

    return Table(folder.name, str(folder), load, files, text_column, folder)


def _check_names(folder: Path) -> None:
    """Raise `UserError` if a saved dataset refers to a file outside its folder."""
    state = folder / "state.json"
    files = {path.name for path in folder.iterdir() if path.is_file()}
    for data_file in json.loads(read_regular(state))["_data_files"]:
        if (name := data_file["filename"]) not in files:
            raise UserError(
                f"{state} refers to {name!r}, which is not a file in its folder; save the dataset "
                "again"
            )


def _read_error(location: str, error: Exception) -> UserError:
    return UserError(
        f"the dataset saved in {location} cannot be read ({first_line(error)}); save it again"
    )


def arrow_rows(
    batch: "pyarrow.RecordBatch | pyarrow.Table", name: str, first: int
) -> Iterator[Row]:
    """Yield the rows of an Arrow batch, numbered from `first`. Values that Python cannot represent,
    such as a time after the year 9999 or invalid UTF-8, become an error of the row."""
    try:
        cells = batch.to_pylist()
    except Exception as error:  # depends on the column's type
        if len(batch) == 1:
            yield Row(f"{name}, row {first}", None, f"a cell cannot be read: {first_line(error)}")
            return
        for index in range(len(batch)):
            yield from arrow_rows(batch.slice(index, 1), name, first + index)
        return
    readers = cell_readers(batch.schema)
    for number, values in enumerate(cells, first):
        yield _read_row(readers, f"{name}, row {number}", values)


def _read_row(readers: Mapping[str, CellReader], where: str, cells: dict[str, object]) -> Row:
    values = {}
    for column, reader in readers.items():
        try:
            values[column] = reader(cells[column])
        except (ValueError, RecursionError) as error:
            return Row(where, None, f"column {column!r} is not valid JSON, {first_line(error)}")
    return Row(where, values)

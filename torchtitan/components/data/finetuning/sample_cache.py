"""Samples as token ids and masks on disk, built once per host, addressed by content, and mapped
into memory.

`{cache}/samples/{key}/` holds, for all sequences of all samples, `ids.bin` (uint32), `trained.bin`
(one byte per token) and `offsets.bin` (int64: sequence starts, and the total); JSON texts
`places.bin` with `place_offsets.bin` (row locations) and, depending on the encoder, `answers.bin`
with `answer_offsets.bin` (reference answers) and `images.bin` with `image_offsets.bin` (images);
`report.json`; `fingerprint`, a digest of the samples; and checksums (see `disk_cache`). The key is
a digest of all inputs that determine the content; the window size is not one of them.
"""

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from torchtitan import components
from torchtitan.components.data.disk_cache import content_digest, map_array, open_or_build, readable
from torchtitan.components.data.finetuning.encoded import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.filters import FilterConfig
from torchtitan.components.data.finetuning.row_batches import (
    BatchEncoder,
    Place,
    encoded_batches,
    name_of,
    row_of,
)
from torchtitan.components.data.finetuning.row_encoder import RowEncoder
from torchtitan.components.data.finetuning.row_formats import RowFormat
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.report import Report, no_rows_left_error
from torchtitan.components.data.sources.rows import OnRead
from torchtitan.components.data.sources.source import Source
from torchtitan.components.tokenizer import DifferentIds
from torchtitan.tools import durable
from torchtitan.tools.digests import check_digest
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.progress import progress

SOURCES = (
    "chat_template/*.py",
    "tokenizer/*.py",
    "data/report.py",
    "data/sources/*.py",
    "data/forks.py",
    "data/finetuning/*.py",
    "data/finetuning/spellings/*.py",
    "images/*.py",
    "images/forms/*.py",
)
"""Glob patterns, relative to `torchtitan/components`, of the modules that affect the content of the
cache."""


@cache
def code_version() -> str:
    """Return a hexadecimal digest of `SOURCES`; any change to this code rebuilds caches."""
    folder = Path(components.__path__[0])
    files = [file for pattern in SOURCES for file in sorted(folder.glob(pattern))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class SampleCache:
    """Samples of `n_parts` token sequences each, with the fields `stored` of `EncodedRow`, from the
    folder of a finished cache, mapped into memory. Pickling stores only the path of the folder."""

    def __init__(self, folder: Path, n_parts: int, stored: Sequence[str] = ()):
        self.folder, self._n_parts = folder, n_parts
        with readable(folder):
            self.report = Report.from_dict(json.loads((folder / "report.json").read_text()))
            n, n_tokens = self.report.samples, self.report.tokens
            self.fingerprint = check_digest((folder / "fingerprint").read_text())
            """Digest of the samples, regardless of their source."""
            self._ids = _mapped(folder / "ids.bin", "uint32", n_tokens)
            self._trained = _mapped(folder / "trained.bin", "bool", n_tokens)
            self._offsets = _mapped(folder / "offsets.bin", "int64", n * n_parts + 1)
            self._places = _Texts(folder, "place", n)
            self._stored = {name: _Texts(folder, name, n) for name in stored}

    def __reduce__(self) -> tuple[object, ...]:
        return SampleCache, (self.folder, self._n_parts, tuple(self._stored))

    @property
    def n_samples(self) -> int:
        return self.report.samples

    @property
    def sequence_lengths(self) -> Array:
        """Tokens of each sequence, (n_samples, n_parts)."""
        return np.diff(self._offsets).reshape(-1, self._n_parts)

    @property
    def lengths(self) -> Array:
        """Tokens of the longest sequence of each sample, (n_samples,)."""
        longest: Array = self.sequence_lengths.max(axis=1)
        return longest

    def sample(self, index: int) -> EncodedRow:
        """Return a sample by its number, from 0 in row order."""
        bounds = self._offsets[index * self._n_parts : (index + 1) * self._n_parts + 1].tolist()
        parts = tuple(
            EncodedSample(
                self._ids[start:stop].astype(np.int64), np.array(self._trained[start:stop])
            )
            for start, stop in itertools.pairwise(bounds)
        )
        return EncodedRow(parts, **{name: texts[index] for name, texts in self._stored.items()})

    def describe(self, index: int) -> str:
        """Return the name of a sample, see `name_of`."""
        return name_of(self._places[index])

    def row_of(self, index: int) -> str:
        """Return the location of a sample's row."""
        return row_of(self._places[index])


def column_files(name: str) -> tuple[str, str]:
    """Return the names, without `.bin`, of the files with a column's values and their offsets."""
    singular = name.removesuffix("s")
    return f"{singular}s", f"{singular}_offsets"


class _Texts:
    """A value for each sample, as JSON, mapped into memory."""

    def __init__(self, folder: Path, name: str, n: int):
        values, offsets = column_files(name)
        self._offsets = _mapped(folder / f"{offsets}.bin", "int64", n + 1)
        self._json = _mapped(folder / f"{values}.bin", "uint8", int(self._offsets[-1]))

    def __getitem__(self, index: int) -> Any:
        return json.loads(
            self._json[self._offsets[index] : self._offsets[index + 1]].tobytes().decode()
        )


def _mapped(path: Path, dtype: str, length: int) -> np.ndarray:
    """Map a file as a plain array; slicing is several times faster than with `np.memmap`."""
    return np.asarray(map_array(path, dtype, length))


def open_sample_cache(
    source: Source,
    format: RowFormat,
    encoder: RowEncoder,
    filters: FilterConfig,
    cache_dir: str = "",
    *,
    verify: bool = False,
    processes: int = 1,
) -> SampleCache:
    """Open the cached samples of a source, encoding them if necessary; see `open_or_build`. Raise
    `UserError` if `filters` reject a row with policy `error`, no row is left, or the cache folder
    is not writable. For `processes`, see `encoded_batches`."""
    return open_or_build(
        "samples",
        source,
        lambda identity: [
            code_version(),
            identity,
            format.fingerprint,
            encoder.fingerprint,
            asdict(filters),
        ],
        partial(SampleCache, n_parts=encoder.n_parts, stored=encoder.stored),
        partial(_build, source, format, encoder, filters, processes),
        cache_dir,
        verify=verify,
    )


def first_columns(source: Source) -> list[str]:
    """Return the columns of the first readable row. Raise `UserError` without such a row."""
    error = ""
    for row in source.rows(lambda _: None):
        if row.values is not None:
            return list(row.values)
        error = error or f"{row.where}: {row.error}"
    raise UserError(error or f"{source.name} has no rows; add some, or name other data")


def _build(
    source: Source,
    format: RowFormat,
    encoder: RowEncoder,
    filters: FilterConfig,
    processes: int,
    folder: Path,
) -> str:
    encoder.arrays.expect(source.size())

    def write() -> Report:
        with progress(f"tokenizing {source.name}", source.size()) as advance:
            return write_samples(source, format, encoder, filters, folder, advance, processes)

    try:
        report = write()
    except DifferentIds as error:
        logger.warning(f"{error.warning}; {source.name} is tokenized again")
        report = write()
    if not report.kept:
        raise no_rows_left_error(source.name, report)
    finish_samples(folder, report, encoder.stored)
    return f"{report.samples:,} samples, {report.tokens:,} tokens"


def finish_samples(folder: Path, report: Report, stored: Sequence[str]) -> None:
    """Add the report and the fingerprint to the arrays of samples."""
    (folder / "report.json").write_text(json.dumps(asdict(report)))
    values = [f"{column_files(name)[0]}.bin" for name in stored]
    contents = ["ids.bin", "trained.bin", "offsets.bin", *values]
    (folder / "fingerprint").write_text(content_digest(folder, contents))


def write_samples(
    source: Source,
    format: RowFormat,
    encoder: RowEncoder,
    filters: FilterConfig,
    folder: Path,
    advance: OnRead,
    processes: int = 1,
) -> Report:
    """Write the arrays of a source's samples. Raise `UserError` if `filters` reject a row with
    policy `error`, `DifferentIds` if the caller must write them again, see `ArrayEncoder`. For
    `processes`, see `encoded_batches`."""
    report = Report(format=format.name)
    rows = source.rows(advance)
    with _writer(folder, encoder.stored) as add:
        for batch in encoded_batches(rows, BatchEncoder(format, encoder, filters), processes):
            report.add(batch.report)
            for place, sample in batch.samples:
                add(place, sample)
    return report


@contextmanager
def _writer(folder: Path, stored: Sequence[str]) -> Iterator[Callable[[Place, EncodedRow], None]]:
    with ExitStack() as stack:

        def column(values: str, offsets: str) -> _Column:
            opened = (
                stack.enter_context(durable.new_file(folder / f"{file}.bin"))
                for file in (values, offsets)
            )
            return _Column(*opened)

        ids = column("ids", "offsets")
        places = column(*column_files("place"))
        others = {name: column(*column_files(name)) for name in stored}
        trained = stack.enter_context(durable.new_file(folder / "trained.bin"))

        def add(place: Place, row: EncodedRow) -> None:
            for part in row.parts:
                ids.add(part.ids.astype(np.uint32).tobytes(), len(part.ids))
                trained.write(np.asarray(part.trained, np.bool_).tobytes())
            places.add_json(place)
            for name, values in others.items():
                values.add_json(getattr(row, name))

        yield add


class _Column:
    """Writes consecutive items to one file, and their start offsets and the total to another."""

    def __init__(self, items: BinaryIO, offsets: BinaryIO):
        self._items = items
        self._offsets = offsets
        self._end = 0
        self.add(b"", 0)

    def add(self, item: bytes, size: int) -> None:
        self._end += size
        self._items.write(item)
        self._offsets.write(self._end.to_bytes(8, sys.byteorder, signed=True))

    def add_json(self, value: object) -> None:
        item = json.dumps(value).encode()
        self.add(item, len(item))

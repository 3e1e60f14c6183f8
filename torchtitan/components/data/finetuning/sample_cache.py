"""Samples as token ids and masks on disk: made once per host, found again by content, mapped into memory.

`{cache}/samples/{key}/` holds `ids.bin` (uint32), `trained.bin` (one byte per token), `offsets.bin` (int64: where each
sample begins, and the total), `n_trained.bin` (int64: predicted tokens of each sample), `places.bin` with
`place_offsets.bin` (where its row is, as text), `report.json`, and `fingerprint`, a digest of the samples. The key is a
digest of everything that decides what is in the folder, which the size of a window does not.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from torchtitan.components.data.disk_cache import (
    build_once,
    cache_root,
    content_digest,
    digest_of,
    file_digest,
    map_array,
    readable,
    writable,
)
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder, EncodedSample
from torchtitan.components.data.finetuning.code_version import code_version
from torchtitan.components.data.finetuning.conversation import BrokenSample, Conversation, Text
from torchtitan.components.data.finetuning.policies import Dropped, Report, Rules, apply_rules, n_trained
from torchtitan.components.data.finetuning.row_formats import RowFormat
from torchtitan.components.data.packing import Array
from torchtitan.components.data.progress import progress
from torchtitan.components.data.rows import Row, RowSource
from torchtitan.tools.errors import UserError

BATCH_ROWS = 1024
"""Rows encoded at a time."""


class SampleCache:
    """The samples of a data set, mapped into memory. Sending it to another process sends the folder's name only."""

    def __init__(self, folder: Path):
        self.folder = folder
        with readable(folder):
            self.report = Report.from_dict(json.loads((folder / "report.json").read_text()))
            n, n_tokens = self.report.kept, self.report.tokens
            self.fingerprint = (folder / "fingerprint").read_text()
            """Equal ones mean equal samples, whatever they were made from."""
            self._ids = map_array(folder / "ids.bin", "uint32", n_tokens)
            self._trained = map_array(folder / "trained.bin", "bool", n_tokens)
            self._offsets = map_array(folder / "offsets.bin", "int64", n + 1)
            self.n_trained = map_array(folder / "n_trained.bin", "int64", n)
            """Predicted tokens of each sample, (n_samples,)."""
            self._place_offsets = map_array(folder / "place_offsets.bin", "int64", n + 1)
            self._places = map_array(folder / "places.bin", "uint8", int(self._place_offsets[-1]))

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleCache, (self.folder,)

    @property
    def n_samples(self) -> int:
        """Number of samples, those left out not among them."""
        return len(self.n_trained)

    @property
    def lengths(self) -> Array:
        """Tokens of each sample, (n_samples,)."""
        return np.diff(self._offsets)

    def sample(self, index: int) -> EncodedSample:
        """The sample with a number from 0, in the order of the rows."""
        tokens = slice(self._offsets[index], self._offsets[index + 1])
        return EncodedSample(self._ids[tokens].astype(np.int64), np.array(self._trained[tokens]))

    def describe(self, index: int) -> str:
        """Where the sample's row is: `my.jsonl:17`."""
        place = slice(self._place_offsets[index], self._place_offsets[index + 1])
        return self._places[place].tobytes().decode()


def open_sample_cache(
    source: RowSource, format: RowFormat, encoder: ChatEncoder, rules: Rules, cache_dir: str = ""
) -> SampleCache:
    """The samples of a source, encoded now if they are not in the cache.

    While one process encodes, others that want the same wait for it.

    Raises:
        UserError: a row cannot be used and `rules` end the run for that, no row is left, or the cache folder cannot be
            written.
    """
    root = cache_root(cache_dir)
    with writable(root):
        digest = partial(file_digest, root)
        identity = source.identity(digest)
        key = [code_version(), identity, format.fingerprint, encoder.fingerprint, asdict(rules)]
        folder = root / "samples" / digest_of(key)
        build_once(
            folder,
            partial(_write, source, format, encoder, rules),
            name=source.name,
            unchanged=lambda: source.identity(digest) == identity,
        )
    return SampleCache(folder)


def first_columns(source: RowSource) -> list[str]:
    """The columns of the first row that can be read, by which its format is recognized.

    Raises:
        UserError: there is no such row.
    """
    error = ""
    for row in source.rows(lambda _: None):
        if row.values is not None:
            return list(row.values)
        error = error or f"{row.where}: {row.error}"
    raise UserError(error or f"{source.name} has no rows")


def _write(source: RowSource, format: RowFormat, encoder: ChatEncoder, rules: Rules, folder: Path) -> str:
    """Write the samples into an empty folder; returns how many there are, in words."""
    report = Report(format=format.name)
    with progress(f"tokenizing {source.name}", source.size()) as advance, _Writer(folder) as writer:
        for row, sample in _encode(source.rows(advance), format, encoder):
            report.rows += 1
            if isinstance(sample, Dropped):
                report.drop(row.where, sample)
                continue
            try:
                outcome = apply_rules(sample, rules)
            except UserError as error:
                raise UserError(f"{row.where}: {error}") from None
            if isinstance(outcome, Dropped):
                report.drop(row.where, outcome)
            else:
                report.keep(row.where, outcome)
                writer.add(row.where, outcome)
    if not report.kept:
        raise UserError("\n".join([f"no row of {source.name} is left to train on", *report.lines()]))
    (folder / "report.json").write_text(json.dumps(report.to_dict()))
    (folder / "fingerprint").write_text(content_digest(folder, ["ids.bin", "trained.bin", "offsets.bin"]))
    return f"{report.kept:,} samples, {report.tokens:,} tokens"


def _encode(
    rows: Iterable[Row], format: RowFormat, encoder: ChatEncoder
) -> Iterator[tuple[Row, EncodedSample | BrokenSample | Dropped]]:
    """Every row with what it became, in their order."""
    rows, checked = iter(rows), False
    while batch := list(itertools.islice(rows, BATCH_ROWS)):
        converted = [_convert(row, format) for row in batch]
        whole = [sample for sample in converted if isinstance(sample, (Conversation, Text))]
        if not checked and any(isinstance(sample, Conversation) for sample in whole):
            encoder.check()
            checked = True
        encoded = iter(encoder.encode_batch(whole))
        for row, sample in zip(batch, converted, strict=True):
            yield row, next(encoded) if isinstance(sample, (Conversation, Text)) else sample


def _convert(row: Row, format: RowFormat) -> Conversation | Text | BrokenSample | Dropped:
    if row.values is None:
        return BrokenSample(row.error)
    try:
        sample = format.convert(row.values)
    except BrokenSample as error:
        return error
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from None
    if sample is None:
        return Dropped("left_out", f"by {format.name}")
    assert isinstance(sample, (Conversation, Text)), f"{format.name} is no format of samples to train on"
    return sample


class _Writer:
    """The files of a cache, written sample by sample."""

    def __init__(self, folder: Path):
        self._stack = ExitStack()
        names = ("ids", "trained", "offsets", "n_trained", "places", "place_offsets")
        self._files = {name: self._stack.enter_context((folder / f"{name}.bin").open("wb")) for name in names}
        self._n_tokens = self._n_bytes = 0

    def __enter__(self) -> Self:
        self._write("offsets", [0])
        self._write("place_offsets", [0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, where: str, sample: EncodedSample) -> None:
        place = where.encode()
        self._n_tokens += len(sample.ids)
        self._n_bytes += len(place)
        self._files["ids"].write(sample.ids.astype(np.uint32).tobytes())
        self._files["trained"].write(sample.trained.astype(np.bool_).tobytes())
        self._files["places"].write(place)
        self._write("n_trained", [n_trained(sample)])
        self._write("offsets", [self._n_tokens])
        self._write("place_offsets", [self._n_bytes])

    def _write(self, name: str, numbers: Sequence[int]) -> None:
        self._files[name].write(np.array(numbers, np.int64).tobytes())

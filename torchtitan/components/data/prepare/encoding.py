"""Encoding of one part of a source into the arrays of a cache, and selection of items from such
arrays."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from torchtitan.components.checkpoint.filesystem import Folder, read_document
from torchtitan.components.data.disk_cache import BLOCKS_FILE, check_content, readable
from torchtitan.components.data.finetuning.filters import FilterConfig
from torchtitan.components.data.finetuning.row_batches import row_of
from torchtitan.components.data.finetuning.row_encoder import RowEncoder
from torchtitan.components.data.finetuning.row_formats import RowFormat
from torchtitan.components.data.finetuning.sample_cache import (
    code_version,
    column_files,
    finish_samples,
    write_samples,
)
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.prepare.classifier import Classifier
from torchtitan.components.data.pretraining import token_cache
from torchtitan.components.data.report import Report
from torchtitan.components.data.sources.source import Source
from torchtitan.components.data.sources.stored import with_patience
from torchtitan.components.tokenizer import ArrayEncoder, Tokenizer
from torchtitan.tools import durable

HASH_BYTES = 16
ITEM = np.dtype(
    [
        ("hash", f"S{HASH_BYTES}"),
        ("split", "u1"),
        ("number", "i8"),
        ("tokens", "i8"),
        ("trained", "i8"),
        ("score", "f4"),
    ]
)
"""An item of arrays: digest of its content, number of its split or of the reason that drops it
(see `preparation`), its number, its tokens, how many of them are predicted, and its score (0
without a classifier)."""

SCORES = "scores.bin"
"""File with the score of each document, float32."""


@dataclass(frozen=True)
class Column:
    """Files with the values of consecutive items, and the file with the items' offsets in them
    (int64)."""

    offsets: str
    values: dict[str, str]
    """File → type of its values."""
    sequences: int = 1
    """Consecutive offsets per item."""
    hashed: bool = True
    """True if items with other values are different."""


@dataclass(frozen=True)
class Encoding:
    """A kind of cache. An item is a document or a sample."""

    kind: str
    identity: Mapping[str, object]
    """JSON-serializable values that determine the arrays of given rows."""
    columns: list[Column]
    """The first has the items' tokens, and maybe `trained.bin`."""
    write: Callable[[Source, Path], tuple[Report, np.ndarray]]
    """Writes the arrays of a source to a folder; returns a report, and a mask of the items to keep,
    (n,)."""
    finish: Callable[[Path, Report, str], None]
    """Completes the arrays in a folder to a cache, given their counts and the name of their first
    part."""
    encoder: ArrayEncoder | None = None
    """Encoder that `write` uses for text; its ids are always the tokenizer's."""
    has_scores: bool = False
    """True if `write` writes `SCORES`."""

    def items(self, folder: Folder, keep: np.ndarray) -> np.ndarray:
        """Return the items of arrays that a mask (n,) keeps, without splits, in the order of their
        hashes, `ITEM` (k,). Equal items have equal hashes, and keep their order."""
        column = self.columns[0]
        offsets = _array(folder, column.offsets)
        bounds = offsets[:: column.sequences]
        contents = zip(
            *(_contents(folder, column) for column in self.columns if column.hashed), strict=True
        )
        items = np.zeros(len(bounds) - 1, ITEM)
        items["hash"] = [
            hashlib.blake2b(b"\0".join(content), digest_size=HASH_BYTES).digest()
            for content in contents
        ]
        items["number"] = np.arange(len(items))
        items["tokens"] = np.diff(bounds)
        items["trained"] = _n_trained(folder, column, offsets)
        if self.has_scores:
            items["score"] = _array(folder, SCORES, "float32")
        items = items[keep]
        return items[np.argsort(items["hash"], kind="stable")]

    def tokens(self, folder: Folder) -> tuple[Array, Array]:
        """Return the tokens of all items, and the start of each and their end, (n + 1,)."""
        column = self.columns[0]
        [name, dtype] = next(iter(column.values.items()))
        return _array(folder, name, dtype), _array(folder, column.offsets)[:: column.sequences]

    def select(self, selections: Sequence[tuple[Folder, Array]], folder: Path) -> None:
        """Write items of several parts, each with the numbers of its items, in their order, to
        arrays in a new folder. Raise `UserError` for a damaged part."""
        folder.mkdir()
        parts = [(PartFiles(source), numbers) for source, numbers in selections]
        for column in self.columns:
            lengths = [np.zeros(1, np.int64)]
            with ExitStack() as stack:
                files = {
                    name: stack.enter_context(durable.new_file(folder / name))
                    for name in column.values
                }
                for source, numbers in parts:
                    of_source = np.diff(source.array(column.offsets))
                    selected = np.zeros(len(of_source), bool)
                    selected.reshape(-1, column.sequences)[numbers] = True
                    lengths.append(of_source[selected])
                    chosen = slice(None) if selected.all() else np.repeat(selected, of_source)
                    for name, dtype in column.values.items():
                        files[name].write(source.array(name, dtype)[chosen].data)
            with durable.new_file(folder / column.offsets) as file:
                file.write(np.cumsum(np.concatenate(lengths)).tobytes())


def document_encoding(
    tokenizer: Tokenizer,
    filters: FilterConfig | None = None,
    classifier: Classifier | None = None,
) -> Encoding:
    """Return the encoding of documents as a token cache, without documents that the filters drop,
    with the scores of a classifier."""
    applied, dtype = filters or FilterConfig(), token_cache.token_dtype(tokenizer)
    encoder = ArrayEncoder(tokenizer)

    def write(source: Source, folder: Path) -> tuple[Report, np.ndarray]:
        token_cache.write_tokens(source, encoder, folder, lambda n: None)
        offsets = np.fromfile(folder / "offsets.bin", np.int64)
        tokens = np.fromfile(folder / "tokens.bin", dtype)
        keep = np.diff(offsets) > 0
        report = Report("text", rows=len(keep))
        has_filters = applied != FilterConfig()
        to_check = range(len(keep)) if has_filters else np.flatnonzero(~keep).tolist()
        for number in to_check:
            ids = tokens[offsets[number] : offsets[number + 1]]
            dropped = applied.drop_reason(ids) if len(ids) else ("empty", "it has no text")
            if dropped:
                report.drop(f"{source.parts[0].name}, document {number + 1}", *dropped)
                keep[number] = False
        if classifier:
            with durable.new_file(folder / SCORES) as file:
                file.write(classifier.scores(source.documents()).tobytes())
        return report, keep

    def finish(folder: Path, report: Report, name: str) -> None:
        meta = {
            "dtype": dtype,
            "n_tokens": report.tokens,
            "documents_per_part": [report.kept],
            "names": [name],
        }
        (folder / "meta.json").write_text(json.dumps(meta))

    wrapped = [tokenizer.fingerprint, *token_cache.document_wrapping(tokenizer)]
    identity = {
        "version": token_cache.FORMAT_VERSION,
        "tokenizer": wrapped,
        "filters": asdict(applied),
    } | ({"classifier": classifier.identity} if classifier else {})
    columns = [Column("offsets.bin", {"tokens.bin": dtype})]
    has_scores = classifier is not None
    return Encoding("tokens", identity, columns, write, finish, encoder, has_scores)


def sample_encoding(
    formats: Mapping[str, RowFormat], encoder: RowEncoder, filters: FilterConfig
) -> Encoding:
    """Return the encoding of samples as a sample cache. `formats` has the row format of each source
    by its name."""

    def write(source: Source, folder: Path) -> tuple[Report, np.ndarray]:
        report = write_samples(
            source, formats[source.name], encoder, filters, folder, lambda n: None
        )
        return report, np.ones(report.samples, bool)

    def finish(folder: Path, report: Report, name: str) -> None:
        finish_samples(folder, report, encoder.stored)

    fingerprints = {
        "format": [each.fingerprint for each in formats.values()],
        "encoder": encoder.fingerprint,
    }
    identity = {"version": code_version(), **fingerprints, "filters": asdict(filters)}
    columns = [
        Column("offsets.bin", {"ids.bin": "uint32", "trained.bin": "bool"}, encoder.n_parts),
        *(
            Column(f"{offsets}.bin", {f"{values}.bin": "uint8"})
            for values, offsets in map(column_files, encoder.stored)
        ),
        Column("place_offsets.bin", {"places.bin": "uint8"}, hashed=False),
    ]
    return Encoding("samples", identity, columns, write, finish, encoder.arrays)


def rows_of(folder: Folder, items: np.ndarray, report: Report) -> np.ndarray:
    """Return a number for the row of each item (n,), equal for the samples of one row."""
    if report.samples == report.kept:
        return items["number"]
    part = PartFiles(folder)
    offsets, texts = part.array("place_offsets.bin"), part.read("places.bin")
    places = [json.loads(texts[start:stop]) for start, stop in itertools.pairwise(offsets.tolist())]
    rows = list(map(row_of, places))
    numbers = {row: number for number, row in enumerate(dict.fromkeys(rows))}
    return np.array([numbers[rows[number]] for number in items["number"].tolist()], np.int64)


def read(folder: Folder, name: str) -> bytes:
    return with_patience(f"reading {folder}/{name}", lambda: folder.read(name))


def read_json(folder: Folder, name: str) -> bytes:
    """Return the content of a file of JSON, of limited size."""
    return with_patience(f"reading {folder}/{name}", lambda: read_document(folder, name))


class PartFiles:
    """The files of a complete part, checked against its checksums, which are read once: each
    reading is a request to a store."""

    def __init__(self, folder: Folder):
        self.folder = folder

    @cached_property
    def _checksums(self) -> bytes:
        return read_json(self.folder, BLOCKS_FILE)

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raise `UserError` if it cannot be read, or does not match
        its checksums, which parts of earlier versions lack."""
        parts = str(self.folder).rpartition("/")[0]
        remedy = (
            f"; remove it, or {parts} if an earlier version of torchtitan wrote it, and run the "
            "command again"
        )
        with readable(self.folder, remedy):
            content = read(self.folder, name)
            check_content(content, name, self._checksums)
        return content

    def array(self, name: str, dtype: str = "int64") -> np.ndarray:
        return np.frombuffer(self.read(name), dtype)


def read_part(folder: Folder, name: str) -> bytes:
    """Return the content of a file of a complete part, as `PartFiles.read`."""
    return PartFiles(folder).read(name)


def _array(folder: Folder, name: str, dtype: str = "int64") -> np.ndarray:
    return np.frombuffer(read(folder, name), dtype)


def _n_trained(folder: Folder, column: Column, offsets: np.ndarray) -> np.ndarray:
    """Return the tokens of each item that are predicted, (n,); nothing predicts the first one of a
    sequence."""
    lengths = np.diff(offsets)
    if "trained.bin" not in column.values:
        return (lengths - (lengths > 0)).reshape(-1, column.sequences).sum(1)
    trained = _array(folder, "trained.bin", "bool").copy()
    trained[offsets[:-1][lengths > 0]] = False
    bounds = offsets[:: column.sequences]
    counts = np.zeros(len(bounds) - 1, np.int64)
    has_tokens = np.diff(bounds) > 0
    if has_tokens.any():
        counts[has_tokens] = np.add.reduceat(trained, bounds[:-1][has_tokens], dtype=np.int64)
    return counts


def _contents(folder: Folder, column: Column) -> Iterator[bytes]:
    """Yield the lengths and values of each item as bytes."""
    offsets, n = _array(folder, column.offsets), column.sequences
    bounds = np.column_stack([offsets[:-1].reshape(-1, n), offsets[n::n]])
    views = [memoryview((bounds - bounds[:, :1]).tobytes())]
    ends = [np.arange(len(bounds) + 1) * bounds.itemsize * (n + 1)]
    for name, dtype in column.values.items():
        views.append(memoryview(read(folder, name)))
        ends.append(offsets[::n] * np.dtype(dtype).itemsize)
    spans = [map(slice, of_view[:-1].tolist(), of_view[1:].tolist()) for of_view in ends]
    for of_item in zip(*spans, strict=True):
        yield b"".join([view[span] for view, span in zip(views, of_item, strict=True)])

"""Encoding of one part of a source into the arrays of a cache, and selection of items from such arrays."""

import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.components.data.disk_cache import BLOCKS_FILE, bytes_digest, record_blocks
from torchtitan.components.data.finetuning.chat_encoding import RowEncoder
from torchtitan.components.data.finetuning.filters import FilterConfig
from torchtitan.components.data.finetuning.row_formats import RowFormat
from torchtitan.components.data.finetuning.sample_cache import code_version, finish_samples, write_samples
from torchtitan.components.data.pretraining.token_cache import (
    FORMAT_VERSION,
    document_wrapping,
    token_dtype,
    write_tokens,
)
from torchtitan.components.data.report import Report
from torchtitan.components.data.sources.source import Source
from torchtitan.components.tokenizer import Tokenizer

HASHES = "hashes.bin"
_HASH_BYTES = 16


@dataclass(frozen=True)
class Column:
    """Files with the values of consecutive items, and the file with the items' offsets in them (int64)."""

    offsets: str
    values: dict[str, str]
    """File → type of its values."""
    sequences: int = 1
    """Consecutive offsets per item."""
    hashed: bool = True
    """True if items with other values are different."""


class Encoding(ABC):
    """A kind of cache. An item is a document or a sample."""

    kind: str
    columns: list[Column]

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the properties that determine the arrays of given rows, as JSON-serializable values."""

    @abstractmethod
    def write(self, source: Source, folder: Path) -> tuple[Report, np.ndarray]:
        """Write the arrays of a source; return a report, and a mask of the items to keep, (n,)."""

    @abstractmethod
    def finish(self, folder: Path, report: Report, name: str) -> None:
        """Complete the arrays in `folder` to a cache. `report` has the counts of these arrays."""

    @abstractmethod
    def _n_trained(self, folder: Path, offsets: np.ndarray) -> int: ...

    def hashes(self, folder: Path) -> np.ndarray:
        """Return a hash of each item, uint64 (n, 2); equal items have equal hashes."""
        columns = [column for column in self.columns if column.hashed]
        items = zip(*(_items(folder, column) for column in columns), strict=True)
        digests = (hashlib.blake2b(b"\0".join(values), digest_size=_HASH_BYTES).digest() for values in items)
        return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)

    def join(
        self,
        selections: Sequence[tuple[Path, np.ndarray]],
        report: Report,
        folder: Path,
        name: str,
        hashes: np.ndarray | None = None,
    ) -> dict[str, Any]:
        """Write the selected items of several folders, each with a mask (n,), into a new cache, with their hashes if
        given; return its counts, and a digest of its checksums."""
        folder.mkdir(parents=True)
        for column in self.columns:
            _join(column, selections, folder)
        offsets = np.fromfile(folder / self.columns[0].offsets, np.int64)
        n_items, n_tokens = (len(offsets) - 1) // self.columns[0].sequences, int(offsets[-1])
        n_trained = self._n_trained(folder, offsets)
        self.finish(folder, replace(report, kept=n_items, tokens=n_tokens, trained_tokens=n_trained), name)
        if hashes is not None:
            (folder / HASHES).write_bytes(hashes.tobytes())
        record_blocks(folder)
        digest = bytes_digest((folder / BLOCKS_FILE).read_bytes())
        return {"items": n_items, "tokens": n_tokens, "trained": n_trained, "digest": digest}


@dataclass(frozen=True)
class DocumentEncoding(Encoding):
    """Documents as a token cache."""

    tokenizer: Tokenizer
    filters: FilterConfig = field(default_factory=FilterConfig)
    kind = "tokens"

    @property
    def columns(self) -> list[Column]:  # type: ignore[override]
        return [Column("offsets.bin", {"tokens.bin": token_dtype(self.tokenizer)})]

    @property
    def identity(self) -> dict[str, Any]:
        tokenizer = [self.tokenizer.fingerprint, document_wrapping(self.tokenizer)]
        return {"version": FORMAT_VERSION, "tokenizer": tokenizer, "filters": asdict(self.filters)}

    def write(self, source: Source, folder: Path) -> tuple[Report, np.ndarray]:
        write_tokens(source, self.tokenizer, folder, lambda n: None)
        offsets = np.fromfile(folder / "offsets.bin", np.int64)
        tokens = np.fromfile(folder / "tokens.bin", token_dtype(self.tokenizer))
        report, keep = Report("text", rows=len(offsets) - 1), np.ones(len(offsets) - 1, bool)
        for index, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
            dropped = self.filters.drop_reason(tokens[start:stop]) if stop > start else ("empty", "it has no text")
            if dropped:
                report.drop(f"{source.name}, document {index + 1}", *dropped)
                keep[index] = False
        return report, keep

    def finish(self, folder: Path, report: Report, name: str) -> None:
        meta = {"dtype": token_dtype(self.tokenizer), "n_tokens": report.tokens, "documents_per_part": [report.kept]}
        (folder / "meta.json").write_text(json.dumps({**meta, "names": [name]}))

    def _n_trained(self, folder: Path, offsets: np.ndarray) -> int:
        return int(offsets[-1]) - (len(offsets) - 1)  # the first token of a document is not predicted


@dataclass(frozen=True)
class SampleEncoding(Encoding):
    """Samples as a sample cache."""

    format: RowFormat
    encoder: RowEncoder
    filters: FilterConfig
    kind = "samples"

    @property
    def columns(self) -> list[Column]:  # type: ignore[override]
        answers = [Column("answer_offsets.bin", {"answers.bin": "uint8"})] if self.encoder.has_answers else []
        return [
            Column("offsets.bin", {"ids.bin": "uint32", "trained.bin": "bool"}, self.encoder.n_parts),
            *answers,
            Column("place_offsets.bin", {"places.bin": "uint8"}, hashed=False),
        ]

    @property
    def identity(self) -> dict[str, Any]:
        fingerprints = {"format": self.format.fingerprint, "encoder": self.encoder.fingerprint}
        return {"version": code_version(), **fingerprints, "filters": asdict(self.filters)}

    def write(self, source: Source, folder: Path) -> tuple[Report, np.ndarray]:
        report = write_samples(source, self.format, self.encoder, self.filters, folder, lambda n: None)
        return report, np.ones(report.kept, bool)

    def finish(self, folder: Path, report: Report, name: str) -> None:
        finish_samples(folder, report, has_answers=self.encoder.has_answers)

    def _n_trained(self, folder: Path, offsets: np.ndarray) -> int:
        trained = np.fromfile(folder / "trained.bin", bool)
        starts = offsets[:-1][np.diff(offsets) > 0]
        return int(trained.sum()) - int(trained[starts].sum())


def _items(folder: Path, column: Column) -> Iterator[bytes]:
    """Yield the values and lengths of each item as bytes."""
    offsets = np.fromfile(folder / column.offsets, np.int64)
    arrays = [np.fromfile(folder / name, dtype) for name, dtype in column.values.items()]
    for first in range(0, len(offsets) - 1, column.sequences):
        bounds = offsets[first : first + column.sequences + 1]
        values = [array[bounds[0] : bounds[-1]].tobytes() for array in arrays]
        yield b"".join([(bounds - bounds[0]).tobytes(), *values])


def _join(column: Column, selections: Sequence[tuple[Path, np.ndarray]], folder: Path) -> None:
    with ExitStack() as stack:
        offsets_file = stack.enter_context((folder / column.offsets).open("wb"))
        files = {name: stack.enter_context((folder / name).open("wb")) for name in column.values}
        end = np.int64(0)
        offsets_file.write(end.tobytes())
        for source, keep in selections:
            lengths: Any = np.diff(np.fromfile(source / column.offsets, np.int64))
            sequences = np.repeat(keep, column.sequences)
            ends = end + np.cumsum(lengths[sequences])
            offsets_file.write(ends.tobytes())
            end = ends[-1] if len(ends) else end
            selected = np.repeat(sequences, lengths)
            for name, dtype in column.values.items():
                files[name].write(np.fromfile(source / name, dtype)[selected].tobytes())

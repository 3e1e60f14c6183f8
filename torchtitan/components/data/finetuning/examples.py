"""Examples that are not one text to imitate: pairs to compare, prompts to answer. Encoded once, kept on disk.

`{cache}/examples/{key}/` holds `ids.bin` (uint32) and `trained.bin` (one byte per token) of all parts, one behind the
other, `offsets.bin` (int64: where each part begins, and the total), `texts.json` (where each example's row is, and its
reference answer), `report.json`, and `fingerprint`, a digest of the examples. The key is one of everything that decides
what is in the folder.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from torchtitan.components.data.finetuning.chat_encoding import EncodedSample
from torchtitan.components.data.finetuning.code_version import code_version
from torchtitan.components.data.finetuning.conversation import BrokenSample, Sample
from torchtitan.components.data.finetuning.policies import Dropped, Report, Rules, apply_rules
from torchtitan.components.data.finetuning.row_formats import RowFormat
from torchtitan.components.data.packing import Array
from torchtitan.components.data.progress import progress
from torchtitan.components.data.rows import Row, RowSource
from torchtitan.tools.errors import UserError


@dataclass(frozen=True, slots=True)
class Example:
    """One row, encoded."""

    parts: tuple[EncodedSample, ...]
    """Its token sequences, as many for every row of a kind: chosen and rejected, or the prompt."""
    answer: str | None = None
    """The reference answer, where there is one."""


@dataclass(frozen=True, kw_only=True)
class ExampleEncoder:
    """How rows of a kind become examples."""

    n_parts: int
    """Token sequences of an example."""
    encode: Callable[[Sample], Example]
    """Raises `BrokenSample` for what cannot be encoded."""
    check: Callable[[], None]
    """Called before the first is encoded; raises `UserError` where nothing can be."""
    fingerprint: str
    """Equal ones encode equally."""


class ExampleCache:
    """The examples of a data set, their tokens mapped into memory. Sending it to another process sends its name."""

    def __init__(self, folder: Path, n_parts: int):
        self.folder = folder
        self._n_parts = n_parts
        with readable(folder):
            self.report = Report.from_dict(json.loads((folder / "report.json").read_text()))
            n, n_tokens = self.report.kept, self.report.tokens
            texts = json.loads((folder / "texts.json").read_text())
            self._places: list[str] = texts["places"]
            self._answers: list[str | None] = texts["answers"]
            self.fingerprint = (folder / "fingerprint").read_text()
            """Equal ones mean equal examples, whatever they were made from."""
            self._ids = map_array(folder / "ids.bin", "uint32", n_tokens)
            self._trained = map_array(folder / "trained.bin", "bool", n_tokens)
            self._offsets = map_array(folder / "offsets.bin", "int64", n * n_parts + 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return ExampleCache, (self.folder, self._n_parts)

    @property
    def lengths(self) -> Array:
        """Tokens of the longest part of each example, (n,)."""
        longest: Array = np.diff(self._offsets).reshape(-1, self._n_parts).max(axis=1)
        return longest

    def example(self, index: int) -> Example:
        """The example with a number from 0, in the order of the rows."""
        bounds = self._offsets[index * self._n_parts : (index + 1) * self._n_parts + 1].tolist()
        parts = tuple(
            EncodedSample(self._ids[start:stop].astype(np.int64), np.array(self._trained[start:stop]))
            for start, stop in zip(bounds, bounds[1:], strict=False)
        )
        return Example(parts, self._answers[index])

    def answer(self, index: int) -> str | None:
        """The example's reference answer."""
        return self._answers[index]

    def describe(self, index: int) -> str:
        """Where the example's row is: `my.jsonl:17`."""
        return self._places[index]


def open_example_cache(
    source: RowSource, format: RowFormat, encoder: ExampleEncoder, rules: Rules, cache_dir: str = ""
) -> ExampleCache:
    """The examples of a source, encoded now if they are not in the cache.

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
        folder = root / "examples" / digest_of(key)
        build_once(
            folder,
            partial(_write, source, format, encoder, rules),
            name=source.name,
            unchanged=lambda: source.identity(digest) == identity,
        )
    return ExampleCache(folder, encoder.n_parts)


def _write(source: RowSource, format: RowFormat, encoder: ExampleEncoder, rules: Rules, folder: Path) -> str:
    """Write the examples into an empty folder; returns how many there are, in words."""
    encoder.check()
    report = Report(format=format.name)
    ends, places, answers = [0], [], []
    with (
        progress(f"tokenizing {source.name}", source.size()) as advance,
        (folder / "ids.bin").open("wb") as ids,
        (folder / "trained.bin").open("wb") as trained,
    ):
        for row, outcome in _examples(source.rows(advance), format, encoder, rules):
            report.rows += 1
            if isinstance(outcome, Dropped):
                report.drop(row.where, outcome)
                continue
            report.keep(row.where, _joined(outcome))
            for part in outcome.parts:
                ids.write(part.ids.astype(np.uint32).tobytes())
                trained.write(part.trained.astype(np.bool_).tobytes())
                ends.append(ends[-1] + len(part.ids))
            places.append(row.where)
            answers.append(outcome.answer)
    if not report.kept:
        raise UserError("\n".join([f"no row of {source.name} is left", *report.lines()]))
    np.array(ends, np.int64).tofile(folder / "offsets.bin")
    (folder / "texts.json").write_text(json.dumps({"places": places, "answers": answers}))
    (folder / "report.json").write_text(json.dumps(report.to_dict()))
    contents = content_digest(folder, ["ids.bin", "trained.bin", "offsets.bin"])
    (folder / "fingerprint").write_text(digest_of([contents, answers]))
    return f"{report.kept:,} examples, {report.tokens:,} tokens"


def _examples(
    rows: Iterator[Row], format: RowFormat, encoder: ExampleEncoder, rules: Rules
) -> Iterator[tuple[Row, Example | Dropped]]:
    """Every row with what it became."""
    for row in rows:
        try:
            yield row, _example(row, format, encoder, rules)
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from None


def _example(row: Row, format: RowFormat, encoder: ExampleEncoder, rules: Rules) -> Example | Dropped:
    try:
        if row.values is None:
            raise BrokenSample(row.error)
        sample = format.convert(row.values)
        if sample is None:
            return Dropped("left_out", f"by {format.name}")
        return encoder.encode(sample)
    except BrokenSample as error:
        outcome = apply_rules(error, rules)
        assert isinstance(outcome, Dropped)
        return outcome


def _joined(example: Example) -> EncodedSample:
    """All parts as one, to be counted."""
    return EncodedSample(
        np.concatenate([part.ids for part in example.parts]),
        np.concatenate([part.trained for part in example.parts]),
        sum(part.n_spelt for part in example.parts),
    )

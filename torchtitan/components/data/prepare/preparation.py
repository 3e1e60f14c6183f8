"""Preparation of data in parts, planned from the sources alone and each written completely or not
at all; `merge` makes one result of them.

The folder of a preparation has `plan/plan.json`; for each part N `parts/PLAN/N/`, with the arrays
of its items, `items.bin`, `bands.bin` if near duplicates are sought, checksums of all of them, and
`part.json`, which marks it as complete; and the result of `merge`, which removes the parts. PLAN is
a digest: preparations do not mix, even if two begin together in a store without conditional writes.
The result is `manifest.json` with the counts of each source and split, and a digest; caches
`SPLIT/DIGEST/`, one per part of text, or one for all samples; `SPLIT.index`, which lists them, see
`INDEX_ROWS`; and tables of scores, see `SCORES`.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NotRequired, TypedDict, TypeVar

import numpy as np

from torchtitan.components.checkpoint.filesystem import Folder, LocalFolder
from torchtitan.components.data.disk_cache import readable, record_blocks
from torchtitan.components.data.forks import forked_calls
from torchtitan.components.data.prepare.encoding import Encoding, read_json
from torchtitan.components.data.prepare.near_duplicates import Bands
from torchtitan.components.data.report import Report
from torchtitan.components.data.sources.rows import Part
from torchtitan.components.data.sources.source import Source
from torchtitan.components.data.sources.stored import divide, with_patience
from torchtitan.components.tokenizer import DifferentIds
from torchtitan.tools import durable
from torchtitan.tools.digests import digest_of, file_version
from torchtitan.tools.errors import RunFailure, UserError, os_errors_as
from torchtitan.tools.logging import logger
from torchtitan.tools.progress import progress

MANIFEST = "manifest.json"
PLAN = "plan.json"
PART = "part.json"
ITEMS = "items.bin"
BANDS = "bands.bin"
"""Bands of the items in their order, uint64 (bands, items)."""
SCORES = "scores"
"""Folder of the result with a table for each part: the score of each document, and its fate."""
WORK = ".work-"
FAST = "gigatoken"
"""Empty file of a part that gigatoken has encoded."""
REFUSED = "gigatoken-differs"
"""Empty file next to the parts, written after gigatoken had other ids in one of them; parts with
`FAST` are not complete."""
TRAIN, VALIDATION = "train", "validation"

FATES = ("duplicate", TRAIN, VALIDATION, "near_duplicate", "low_score")
"""Split of an item or reason that drops it, by the number in `ITEM`."""
DUPLICATE, OF_TRAIN, OF_VALIDATION, NEAR_DUPLICATE, LOW_SCORE = range(len(FATES))

INDEX_ROWS = 3
"""Rows of an index, int64 (INDEX_ROWS, caches): first token, and the cache's digest (two rows)."""


class SplitCounts(TypedDict):
    """A split in the manifest."""

    tokens: int
    items: int
    parts: int
    """Caches."""
    digest: str
    """Digest of the index."""


class Manifest(TypedDict):
    """Content of `MANIFEST`."""

    kind: str
    encoding: Mapping[str, object]
    digest: str
    """Digest of the splits."""
    splits: dict[str, SplitCounts]
    sources: dict[str, list[tuple[str, dict[str, object]]]]
    """Name and report of each source, by split."""
    manifest: NotRequired[str]
    """Digest of all other keys; missing in older ones."""


PLAN_FORMAT = 2
"""Number of the plan's keys and their meaning; plans without one had the words of messages as
keys."""

_PLAN_WORDS = {
    "kind": "kind",
    "encoding": "tokenizer, filters, classifier, template or version of torchtitan",
    "part_bytes": "--part_size",
    "held_out": "--held_out",
    "deduplicate": "--keep_duplicates",
    "near_duplicates": "--near_duplicates",
    "keep_best": "--keep_best",
    "sources": "sources",
}
"""Keys of a plan, which stay the same when messages change, and their words in a message."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A preparation of sources in a folder. The same sources and options always have the same
    parts, so any number of processes and hosts can write them, in any order and repeatedly."""

    open_sources: Callable[[], Sequence[Source]]
    """Lists the sources: at the start, and before the end to find changes."""
    place: Folder
    encoding: Encoding
    part_bytes: int
    """Maximum bytes of a part of a file that can be divided."""
    held_out: float = 0.0
    """Fraction of the items, selected by hash, in the split `validation`."""
    deduplicate: bool = True
    """Remove items that equal an earlier item of any source."""
    near_duplicates: Bands | None = None
    """Remove documents that are similar to an earlier document of any source."""
    keep_best: float | None = None
    """Fraction of the other documents to keep, best scores first. None: all."""

    @cached_property
    def sources(self) -> Sequence[Source]:
        return self.open_sources()

    @cached_property
    def parts(self) -> list[tuple[int, Part]]:
        """Number of the source, and part of it."""
        return [
            (number, piece)
            for number, source in enumerate(self.sources)
            for part in source.parts
            for piece in divide(part, self.part_bytes)
        ]

    @cached_property
    def plan(self) -> dict[str, object]:
        """Everything that determines the result, as JSON values by the keys of `_PLAN_WORDS`. Files
        are identified by `file_version`, since reading them takes long."""
        return {
            "format": PLAN_FORMAT,
            "kind": self.encoding.kind,
            "encoding": self.encoding.identity,
            "part_bytes": self.part_bytes,
            "held_out": self.held_out,
            "deduplicate": self.deduplicate,
            "near_duplicates": self.near_duplicates and asdict(self.near_duplicates),
            "keep_best": self.keep_best,
            "sources": [[source.name, source.identity(file_version)] for source in self.sources],
        }

    def begin(self) -> None:
        """Create the folder, or continue in it. Raise `UserError` if it holds another preparation
        or other files, or is not writable."""
        if not has_file(self.place / "plan", PLAN):
            with self.working() as work:
                names = (
                    os.listdir(self.place)
                    if isinstance(self.place, LocalFolder)
                    else self.place.files()
                )
                # not work folders
                others = {name.partition("/")[0] for name in names if name[0] != "."}
                if others and "plan" not in others:  # otherwise, another process has begun
                    raise UserError(
                        f"{self.place} holds other files, such as {min(others)}; set --out to a "
                        "new folder"
                    )
                self.place.create()
                (work / "plan").mkdir()
                (work / "plan" / PLAN).write_text(json.dumps(self.plan))
                publish(work / "plan", self.place / "plan", PLAN)
            logger.info(
                f"until {self.place} is complete, sources are compared by size and times, not by "
                "content"
            )
        self.check()

    def is_complete(self) -> bool:
        """Return whether there is a result, next to a plan."""
        return has_file(self.place, MANIFEST) and has_file(self.place / "plan", PLAN)

    def check(self) -> None:
        """Raise `UserError` if the folder holds another preparation."""
        with readable(self.place, "; set --out to a new folder"):
            begun = json.loads(read_json(self.place / "plan", PLAN))
        plan = json.loads(json.dumps(self.plan))
        if not isinstance(begun, dict) or begun.get("format") != PLAN_FORMAT:
            raise UserError(
                f"{self.place} was begun by another version of torchtitan, whose {PLAN} has other "
                "keys; continue with that version, or set --out to a new folder"
            )
        if changed := " and ".join(
            words for key, words in _PLAN_WORDS.items() if plan[key] != begun.get(key)
        ):
            how = " (compared by size and times)" if plan["sources"] != begun.get("sources") else ""
            raise UserError(
                f"{self.place} was begun with other {changed}, or they have changed{how}; set "
                "--out to a new folder"
            )

    @contextlib.contextmanager
    def _unless_complete(self) -> Iterator[None]:
        """Ignore a `UserError` in the block if another process has completed the preparation, which
        removes parts and work folders that are still in use."""
        try:
            yield
        except UserError:
            if not self.is_complete():
                raise

    @contextlib.contextmanager
    def working(self) -> Iterator[Path]:
        """Yield a temporary folder, in the same file system if possible. Convert an `OSError` in
        the block to a `UserError`, and ignore it if the preparation is complete."""
        local = self.place.path if isinstance(self.place, LocalFolder) else None
        where, options = (
            (local, "--out")
            if local
            else (f"{self.place} or {tempfile.gettempdir()}", "--out or TMPDIR")
        )
        with (
            self._unless_complete(),
            os_errors_as(f"cannot write to {where}", f"; set {options} to another"),
        ):
            if local:
                durable.make_folder(local)
            with tempfile.TemporaryDirectory(
                prefix=WORK, dir=local, ignore_cleanup_errors=True
            ) as folder:
                yield Path(folder)

    @cached_property
    def _parts_folder(self) -> Folder:
        return self.place / "parts" / digest_of(self.plan)

    def folder(self, number: int) -> Folder:
        return self._parts_folder / f"{number:06}"

    def missing(self) -> list[int]:
        """Return the numbers of the parts that are not complete; none after the merge, which
        removes the parts."""
        with self._unless_complete():
            files = with_patience(f"listing {self._parts_folder}", self._parts_folder.files)
            # asked afterwards, so that the parts were there when they were listed
            if not self.is_complete():
                complete = _folders_with(PART, files)
                if REFUSED in files:
                    complete -= _folders_with(FAST, files)
                return [n for n in range(len(self.parts)) if f"{n:06}" not in complete]
        return []

    def write(self, number: int) -> int:
        """Write a part; return its tokens. Raise `UserError` if it cannot be read or written."""
        (source, part), report = self.parts[number], Report()
        is_refused = self._is_refused()
        with self.working() as work:
            folder = work / "part"
            folder.mkdir()
            report, keep = self.encoding.write(self.sources[source].with_parts([part]), folder)
            items = self.encoding.items(LocalFolder(folder), keep)
            is_held_out = items["hash"] < int(self.held_out * 256**8).to_bytes(8)
            items["split"] = np.where(is_held_out, OF_VALIDATION, OF_TRAIN)
            with durable.new_file(folder / ITEMS) as file:
                file.write(items.tobytes())
            if self.near_duplicates:
                bands = self.near_duplicates.of(*self.encoding.tokens(LocalFolder(folder)))
                with durable.new_file(folder / BANDS) as file:
                    file.write(np.ascontiguousarray(bands[:, items["number"]]).data)
            kept = report.kept if self.encoding.kind == "samples" else len(items)
            report = replace(
                report, kept=kept, samples=len(items), tokens=int(items["tokens"].sum())
            )
            (folder / PART).write_text(json.dumps(asdict(report)))
            is_fast = self.encoding.encoder is not None and self.encoding.encoder.is_fast
            if is_fast:
                (folder / FAST).touch()
            record_blocks(folder)
            target = self.folder(number)
            if is_refused and has_file(target, FAST):
                with_patience(f"removing {target}", lambda: _remove_part(target))
            publish(folder, target, PART, FAST if is_fast else "")
        return report.tokens

    def _is_refused(self) -> bool:
        """Return whether gigatoken had other ids in any part, here or on another host; then, do not
        use it."""
        encoder = self.encoding.encoder
        if encoder is None or not has_file(self._parts_folder, REFUSED):
            return False
        encoder.close()
        return True

    def _refuse(self) -> None:
        """Mark the parts that gigatoken has encoded, on any host, as incomplete."""
        with self._unless_complete(), self.working() as work:
            if not self.is_complete():
                self._parts_folder.create()
                write_file(self._parts_folder, REFUSED, b"", work)

    def write_all(self, numbers: Sequence[int], workers: int) -> None:
        """Write parts and show progress and throughput. If gigatoken has other ids than the
        tokenizer in one of them, write them without it, and also all others that it has encoded."""
        if self.encoding.encoder:
            # once, before forks
            self.encoding.encoder.expect(sum(self.parts[number][1].size() for number in numbers))
        try:
            self._write_all(numbers, workers)
        except DifferentIds as error:
            logger.warning(f"{error.warning}; the parts that gigatoken has encoded are rewritten")
            self._refuse()
            # The others that are missing belong to other hosts.
            wrong = [number for number in self.missing() if has_file(self.folder(number), FAST)]
            self._write_all(sorted({*wrong, *numbers} & {*self.missing()}), workers)

    def _write_all(self, numbers: Sequence[int], workers: int) -> None:
        started, n_tokens = time.monotonic(), 0
        with progress("preparing", len(numbers)) as advance:
            for tokens in run_in_processes(self.write, numbers, workers):
                n_tokens += tokens
                advance(1, f"preparing, {n_tokens / (time.monotonic() - started):,.0f} tokens/s")
        logger.info(
            f"parts written: {len(numbers):,} ({n_tokens:,} tokens in "
            f"{time.monotonic() - started:,.1f} s)"
        )


def _folders_with(name: str, files: Iterable[str]) -> set[str]:
    """Return the folders of the files with this name."""
    return {file.removesuffix(f"/{name}") for file in files if file.endswith(f"/{name}")}


def _remove_part(folder: Folder) -> None:
    with contextlib.suppress(FileNotFoundError):  # another host removes it
        folder.remove(PART)


def write_file(folder: Folder, name: str, content: bytes, work: Path) -> None:
    """Write a file atomically, by way of `work`, since another merge may write the same one."""
    if isinstance(folder, LocalFolder):
        (work / name).write_bytes(content)
        durable.replace(work / name, folder.path / name)
    else:
        with_patience(f"writing {folder}/{name}", lambda: folder.write(name, content))


def has_file(folder: Folder, name: str) -> bool:
    return with_patience(f"reading {folder}", lambda: folder.has_file(name))


def publish(folder: Path, target: Folder, last: str, first: str = "") -> None:
    """Move a complete local folder to its place. In a store, the file `first` is written first, and
    `last` last. Leave the folder of another process that was faster: it has the same content,
    except for plans."""
    if isinstance(target, LocalFolder):
        durable.make_folder(target.path.parent)
        try:
            durable.rename(folder, target.path)
        except OSError:
            if not target.exists():
                raise
        return
    names = LocalFolder(folder).files()
    for name in sorted(names, key=lambda name: (name == last, name != first)):
        write = target.write_new if name == last else target.write
        with contextlib.suppress(FileExistsError):
            with_patience(
                f"writing {target}/{name}", partial(write, name, (folder / name).read_bytes())
            )


def run_in_processes(
    function: Callable[[int], T], numbers: Sequence[int], workers: int
) -> Iterator[T]:
    """Yield the function's results for the numbers in order of completion. Raise `RunFailure` if a
    process is killed."""
    if workers == 1:
        yield from map(function, numbers)
        return
    with forked_calls(function, workers) as call:
        futures = [call(number) for number in numbers]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise RunFailure(
                "a process was killed, possibly for lack of memory (set --workers); run the same "
                "command again to continue: complete parts are kept"
            ) from None

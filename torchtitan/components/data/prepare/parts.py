"""Parts of a preparation: planned from the sources alone, and each written completely or not at all."""

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from torchtitan.components.checkpoint.filesystem import Folder, LocalFolder
from torchtitan.components.data.disk_cache import digest_of
from torchtitan.components.data.prepare.encoding import Encoding, read
from torchtitan.components.data.sources.rows import Part
from torchtitan.components.data.sources.source import Source
from torchtitan.components.data.sources.stored import divide, with_patience
from torchtitan.tools import durable
from torchtitan.tools.errors import RunFailure, UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.process import signal_when_orphaned
from torchtitan.tools.progress import SECONDS_BETWEEN_LINES

MANIFEST, PLAN, PART, ITEMS = "manifest.json", "plan.json", "part.json", "items.bin"
TRAIN, VALIDATION = "train", "validation"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A preparation of sources in a folder. The same sources and options always have the same parts, so any number of
    processes and hosts can write them, in any order and repeatedly.

    Layout of the folder: `plan/plan.json`; for each part N `parts/PLAN/N/`, with the arrays of its items, `items.bin`,
    and `part.json`, which marks it as complete; and the result of `merge`, which removes the parts. PLAN is a digest:
    preparations do not mix, even if two begin together in a store without conditional writes.
    """

    open_sources: Callable[[], Sequence[Source]]
    """Lists the sources as they are now."""
    place: Folder
    encoding: Encoding
    part_bytes: int
    """Maximum bytes of a part of a file that can be divided."""
    held_out: float = 0.0
    """Fraction of the items, selected by hash, in the split `validation`."""
    deduplicate: bool = True
    """Remove items that equal an earlier item of any source."""

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

    @property
    def splits(self) -> dict[str, int]:
        """Splits and their numbers."""
        return {TRAIN: 1, VALIDATION: 2} if self.held_out else {TRAIN: 1}

    @cached_property
    def plan(self) -> dict[str, Any]:
        """Everything that determines the result, as JSON values. Files count as equal if their sizes and times are
        equal, since reading them takes long."""

        def version(path: Path) -> str:
            stat = path.stat()
            return f"{stat.st_size} {stat.st_mtime_ns}"

        return {
            "kind": self.encoding.kind,
            "encoding": self.encoding.identity,
            "part_bytes": self.part_bytes,
            "held_out": self.held_out,
            "deduplicate": self.deduplicate,
            "sources": [[source.name, source.identity(version)] for source in self.sources],
        }

    def begin(self) -> None:
        """Create the folder, or continue in it. Raise `UserError` if it holds another preparation or other files, or
        is not writable."""
        plan = json.dumps(self.plan)
        with self.working() as work:
            if not has_file(self.place / "plan", PLAN):
                names = os.listdir(self.place) if isinstance(self.place, LocalFolder) else self.place.files()
                others = {name.partition("/")[0] for name in names if name[0] != "."}  # not work folders of others
                if others and "plan" not in others:  # otherwise, another process has begun
                    raise UserError(f"{self.place} holds other files, such as {min(others)}; set --out to a new folder")
                self.place.create()
                (work / "plan").mkdir()
                (work / "plan" / PLAN).write_text(plan)
                publish(work / "plan", self.place / "plan", PLAN)
            self.check()

    def check(self) -> None:
        """Raise `UserError` if the folder holds another preparation."""
        begun = json.loads(read(self.place / "plan", PLAN))
        if changed := [name for name in self.plan if digest_of(self.plan[name]) != digest_of(begun.get(name))]:
            raise UserError(
                f"{self.place} was begun with other {' and '.join(changed)}, or they have changed; set --out to a new "
                "folder"
            )

    @contextlib.contextmanager
    def working(self) -> Iterator[Path]:
        """Yield a temporary folder, in the same file system if possible; killed processes leave theirs. Turn an
        `OSError` in the block into a `UserError`."""
        inside, places, options = None, f"{self.place} or {tempfile.gettempdir()}", "--out or TMPDIR"
        try:
            if isinstance(self.place, LocalFolder):
                inside, places, options = self.place.path, str(self.place), "--out"
                self.place.create()
            # NFS keeps files that are still mapped into memory.
            with tempfile.TemporaryDirectory(prefix=".work-", dir=inside, ignore_cleanup_errors=True) as folder:
                yield Path(folder)
        except OSError as error:
            raise UserError(f"cannot write to {places}: {error.strerror or error}; set {options} to another") from error

    @cached_property
    def _parts_folder(self) -> Folder:
        return self.place / "parts" / digest_of(self.plan)

    def folder(self, number: int) -> Folder:
        return self._parts_folder / f"{number:06}"

    def missing(self) -> list[int]:
        """Return the numbers of the parts that are not complete; none after the merge, which removes the parts."""
        if has_file(self.place, MANIFEST):
            return []
        files = with_patience(f"listing {self._parts_folder}", self._parts_folder.files)
        return [number for number in range(len(self.parts)) if f"{number:06}/{PART}" not in files]

    def write(self, number: int) -> int:
        """Write a part; return its tokens. Raise `UserError` if it cannot be read or written."""
        source_number, part = self.parts[number]
        source = self.sources[source_number].with_parts([part])
        with self.working() as work:
            everything, complete = work / "everything", work / "complete"
            everything.mkdir()
            report, keep = self.encoding.write(source, everything)
            self.encoding.select([(LocalFolder(everything), keep)], complete)
            items = self.encoding.items(LocalFolder(complete))
            items.tofile(complete / ITEMS)
            report = replace(report, kept=len(items), tokens=int(items["tokens"].sum()))
            (complete / PART).write_text(json.dumps(report.to_dict()))
            publish(complete, self.folder(number), PART)
        return report.tokens

    def write_all(self, numbers: Sequence[int], workers: int) -> None:
        """Write parts and log progress and throughput."""
        started, last, n_tokens = time.monotonic(), 0.0, 0
        for n_done, (_, tokens) in enumerate(run_in_processes(self.write, numbers, workers), 1):
            n_tokens, now = n_tokens + tokens, time.monotonic()
            if now - last >= SECONDS_BETWEEN_LINES or n_done == len(numbers):
                last, speed = now, n_tokens / (now - started)
                logger.info(f"{n_done:,} of {len(numbers):,} parts, {n_tokens:,} tokens ({speed:,.0f} tokens/s)")


def write(folder: Folder, name: str, content: bytes) -> None:
    with_patience(f"writing {folder}/{name}", lambda: folder.write(name, content))


def has_file(folder: Folder, name: str) -> bool:
    return with_patience(f"reading {folder}", lambda: folder.has_file(name))


def publish(folder: Path, target: Folder, last: str) -> None:
    """Move a complete local folder to its place. In a store, the file `last` is written last. Leave the folder of
    another process that was faster: it has the same content, except for plans."""
    if isinstance(target, LocalFolder):
        durable.make_folder(target.path.parent)
        try:
            durable.rename(folder, target.path)
        except OSError:
            if not target.exists():
                raise
        return
    for name in sorted(LocalFolder(folder).files(), key=lambda name: name == last):
        write = target.write_new if name == last else target.write
        with contextlib.suppress(FileExistsError):
            with_patience(f"writing {target}/{name}", partial(write, name, (folder / name).read_bytes()))


def run_in_processes(function: Callable[[int], T], numbers: Sequence[int], workers: int) -> Iterator[tuple[int, T]]:
    """Yield each number and the function's result, in order of completion. Raise `RunFailure` if a process is
    killed."""
    if workers == 1:
        yield from zip(numbers, map(function, numbers), strict=True)
        return
    global _function
    _function = function  # forked processes inherit it, since it cannot be pickled
    context, initialize = multiprocessing.get_context("fork"), (signal.SIGKILL, os.getpid())
    with ProcessPoolExecutor(workers, context, signal_when_orphaned, initialize) as pool:
        futures = {pool.submit(_call, number): number for number in numbers}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise RunFailure(
                "a process was killed, possibly for lack of memory (set --workers); run the same command again to "
                "continue: complete parts are kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _call(number: int) -> Any:
    return _function(number)


_function: Callable[[int], Any]

"""Merge of the parts of a preparation, with exact deduplication over all of them."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.components.checkpoint.filesystem import UNFINISHED, Folder, LocalFolder
from torchtitan.components.data.disk_cache import BLOCKS_FILE, record_blocks
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.prepare.encoding import HASH_BYTES, ITEM, read, rows_of
from torchtitan.components.data.prepare.preparation import (
    ITEMS,
    MANIFEST,
    PART,
    PLAN,
    TRAIN,
    VALIDATION,
    WORK,
    Preparation,
    has_file,
    publish,
    run_in_processes,
    write_file,
)
from torchtitan.components.data.report import ExampleCounter, Report, no_rows_left_error
from torchtitan.tools import durable
from torchtitan.tools.digests import bytes_digest, digest_of
from torchtitan.tools.errors import UserError, os_errors_as
from torchtitan.tools.logging import logger

ITEMS_PER_PASS = 1 << 24
"""Approximate number of hashes that a process compares at a time, which need about 90 bytes
each."""

_PARTS_AT_A_TIME = 256
"""Parts whose hashes are in memory while they are copied."""


def merge(preparation: Preparation, workers: int) -> None:
    """Write the items of each split, of equal ones the first, and the manifest; then remove the
    parts. May be killed and repeated. Raise `UserError` if parts are missing, a split is empty, or
    the plan or the sources have changed."""
    place = preparation.place
    if has_file(place / "plan", PLAN):
        preparation.check()
    if missing := preparation.missing():
        raise UserError(
            f"{len(missing):,} of {len(preparation.parts):,} parts in {place} are missing, first "
            f"{missing[0] + 1}; run the same command without --merge to write them"
        )
    if not preparation.is_complete():
        with preparation.working() as work:
            manifest = _Merge(preparation, workers, work).write()
            replace(preparation).check()
            write_file(place, MANIFEST, json.dumps(manifest).encode(), work)
    with os_errors_as(f"{place} is complete, but its parts cannot be removed"):
        _remove_parts(place)
    manifest = json.loads(read(place, MANIFEST))
    counts = (
        f"{split}: {of['items']:,} items, {of['tokens']:,} tokens"
        for split, of in manifest["splits"].items()
    )
    logger.info(f"{place} is complete: {'; '.join(counts)}; digest {manifest['digest']}")


class _Merge:
    """The items of all parts, in files in the folder `work`."""

    def __init__(self, preparation: Preparation, workers: int, work: Path):
        self.preparation = preparation
        self.workers = workers
        self.work = work
        self.splits = {TRAIN: 1, VALIDATION: 2} if preparation.held_out else {TRAIN: 1}
        folders = [preparation.folder(part) for part in range(len(preparation.parts))]
        # a store takes long to answer
        with ThreadPoolExecutor(16) as pool, durable.new_file(work / "items") as file:
            reports = pool.map(lambda folder: json.loads(read(folder, PART)), folders)
            self.found = list(map(Report.from_dict, reports))
            for first in range(0, len(folders), _PARTS_AT_A_TIME):
                file.writelines(
                    pool.map(partial(read, name=ITEMS), folders[first : first + _PARTS_AT_A_TIME])
                )
        if not any(report.kept for report in self.found):
            raise no_rows_left_error(
                ", ".join(of.name for of in preparation.sources), Report.total(self.found)
            )
        ends = np.cumsum([report.samples for report in self.found])
        if (work / "items").stat().st_size != ends[-1] * ITEM.itemsize:
            parts = f"{preparation.place}/parts"
            raise UserError(
                f"{parts} is damaged, or of another version; remove it and prepare all parts again"
            )
        items = np.memmap(work / "items", ITEM, "r+")
        self.items = np.split(items, ends[:-1])
        """Items of each part, `ITEM` (n,); duplicates are in no split."""
        n_passes = 1 + len(items) // ITEMS_PER_PASS

        def remove_duplicates(index: int) -> None:
            items["split"][find_duplicates(self.items, index, n_passes)] = 0

        if preparation.deduplicate:
            list(run_in_processes(remove_duplicates, range(n_passes), workers))

    def write(self) -> dict[str, Any]:
        """Write the caches and the index of each split; return the manifest."""
        preparation = self.preparation
        encoding = preparation.encoding
        parts = range(len(self.found))
        reports = {split: [self._report(part, split) for part in parts] for split in self.splits}
        for split, of_parts in reports.items():
            if not any(report.kept for report in of_parts):
                selected = (
                    "no document; increase" if split == VALIDATION else "all documents; decrease"
                )
                raise UserError(f"--held_out selects {selected} it, or leave it out")
        splits, sources = {}, {}
        for split, of_parts in reports.items():
            totals = [(source.name, Report()) for source in preparation.sources]
            for (source, _), report in zip(preparation.parts, of_parts, strict=True):
                totals[source][1].add(report)
            sources[split] = [(name, asdict(total)) for name, total in totals]
            splits[split] = self._write_caches(split, of_parts)
        description = {
            "kind": encoding.kind,
            "encoding": encoding.identity,
            "digest": digest_of(splits),
        }
        return {**description, "splits": splits, "sources": sources}

    def _kept(self, part: int, split: str) -> np.ndarray:
        items = self.items[part]
        return items[items["split"] == self.splits[split]]

    def _report(self, part: int, split: str) -> Report:
        """Return the counts of a part's items in a split; the others are dropped rows."""
        report = self.found[part]
        items = self.items[part]
        kept = self._kept(part, split)
        tokens, trained = (int(kept[name].sum()) for name in ("tokens", "trained"))
        rows = rows_of(self.preparation.folder(part), items, report)
        kept_rows = {*rows[items["split"] == self.splits[split]].tolist()}
        left_out = sum(row in kept_rows for row in rows.tolist()) - len(kept)
        others = {
            *rows[(items["split"] != 0) & (items["split"] != self.splits[split])].tolist()
        } - kept_rows
        duplicates = {*rows[items["split"] == 0].tolist()} - kept_rows - others
        counts = {"duplicate": len(duplicates), "other_split": len(others)}
        dropped = report.dropped | {
            reason: ExampleCounter(count) for reason, count in counts.items()
        }
        return replace(
            report,
            kept=len(kept_rows),
            samples=len(kept),
            left_out=ExampleCounter(report.left_out.count + left_out, report.left_out.examples),
            tokens=tokens,
            trained_tokens=trained,
            dropped=dropped,
        )

    def _write_caches(self, split: str, reports: Sequence[Report]) -> dict[str, object]:
        """Write the caches and the index of a split, with the reports of its parts; return its
        counts."""
        preparation = self.preparation
        encoding = preparation.encoding
        parts = range(len(reports))
        groups = (
            [[*parts]]
            if encoding.kind == "samples"
            else [[part] for part in parts if reports[part].kept]
        )
        totals = [Report.total(reports[part] for part in group) for group in groups]

        def write_cache(number: int) -> tuple[int, str]:
            """Write the items of a group of parts to a cache; return its number and digest."""
            group = groups[number]
            selections = [
                (preparation.folder(part), self._kept(part, split)["number"]) for part in group
            ]
            with tempfile.TemporaryDirectory(dir=self.work) as temporary:
                folder = Path(temporary) / "cache"
                encoding.select(selections, folder)
                encoding.finish(folder, totals[number], preparation.parts[group[0]][1].name)
                record_blocks(folder)
                digest = bytes_digest((folder / BLOCKS_FILE).read_bytes())
                publish(folder, preparation.place / split / digest, BLOCKS_FILE)
            return number, digest

        digests = [
            digest
            for _, digest in sorted(run_in_processes(write_cache, range(len(groups)), self.workers))
        ]
        total = Report.total(totals)
        ends = np.cumsum([0, *(of_group.tokens for of_group in totals)])
        index = np.vstack(
            [ends[:-1], np.frombuffer(bytes.fromhex("".join(digests)), np.int64).reshape(-1, 2).T]
        ).tobytes()
        write_file(preparation.place, f"{split}.index", index, self.work)
        return {
            "tokens": total.tokens,
            "items": total.samples,
            "parts": len(groups),
            "digest": bytes_digest(index),
        }


def find_duplicates(parts: Sequence[np.ndarray], index: int = 0, n_passes: int = 1) -> Array:
    """Return the indices, over all parts, of the items that repeat an earlier item of the same
    hash. `parts` has each part's items in the order of their hashes, `ITEM` (n,). A pass compares
    one of `n_passes` ranges of hashes."""
    low, high = (number * 256**HASH_BYTES // n_passes for number in (index, index + 1))
    first, last = low.to_bytes(HASH_BYTES), (high - 1).to_bytes(HASH_BYTES)
    hashes = []
    indices = []
    n_before = 0
    for items in parts:
        start = np.searchsorted(items["hash"], first)
        stop = np.searchsorted(items["hash"], last, side="right")
        hashes.append(items["hash"][start:stop])
        indices.append(np.arange(start, stop) + n_before)
        n_before += len(items)
    _, originals = np.unique(np.concatenate(hashes), return_index=True)  # the first of equal hashes
    return np.delete(np.concatenate(indices), originals)


def _remove_parts(place: Folder) -> None:
    """Remove all that is no longer needed, also what killed processes have left."""
    if (parts := place / "parts").exists():
        with contextlib.suppress(FileNotFoundError):  # another merge removes them
            parts.remove(PART)
    if isinstance(place, LocalFolder):
        for left in (*place.path.glob(f"{WORK}*"), *place.path.glob(f"*{UNFINISHED}")):
            shutil.rmtree(left, ignore_errors=True)

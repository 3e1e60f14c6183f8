"""Merge of a preparation's parts: exact deduplication over all of them, and the manifest.

`manifest.json` has the counts of each source and split, and a digest of the result. `SPLIT/DIGEST/` are caches, one per
part of text, or one for all samples; `SPLIT.index` lists them, see `INDEX_ROWS`.
"""

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.components.checkpoint.filesystem import UNFINISHED, Folder, LocalFolder
from torchtitan.components.data.disk_cache import BLOCKS_FILE, bytes_digest, digest_of, record_blocks
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.prepare.encoding import HASH_BYTES, ITEM, read
from torchtitan.components.data.prepare.parts import (
    ITEMS,
    MANIFEST,
    PART,
    Preparation,
    has_file,
    publish,
    run_in_processes,
    write,
)
from torchtitan.components.data.report import Report, no_rows_left_error
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

INDEX_ROWS = 3
"""Rows of an index, int64 (INDEX_ROWS, caches): first token, and the cache's digest (two rows)."""

ITEMS_PER_PASS = 1 << 24
"""Approximate number of hashes that a process compares at a time, which need about 90 bytes each."""


def merge(preparation: Preparation, workers: int) -> None:
    """Write the items of each split, of equal ones the first, and the manifest; then remove the parts. May be killed
    and repeated. Raise `UserError` if parts are missing, a split is empty, or the plan or the sources have changed."""
    place = preparation.place
    preparation.check()
    if missing := preparation.missing():
        raise UserError(
            f"{len(missing):,} of {len(preparation.parts):,} parts in {place} are missing, first {missing[0] + 1}; run "
            "the same command without --merge to write them"
        )
    with preparation.working() as work:
        if not has_file(place, MANIFEST):
            manifest = _Merge(preparation, workers, work).write()
            replace(preparation).check()  # lists the sources again
            write(place, MANIFEST, json.dumps(manifest).encode())
        _remove_parts(place)
    manifest = json.loads(read(place, MANIFEST))
    counts = (f"{split}: {of['items']:,} items, {of['tokens']:,} tokens" for split, of in manifest["splits"].items())
    logger.info(f"{place} is complete: {'; '.join(counts)}; digest {manifest['digest']}")


class _Merge:
    """The items of all parts, and the splits that have them.

    Args:
        work: folder for files that are mapped into memory.
    """

    def __init__(self, preparation: Preparation, workers: int, work: Path):
        self.preparation, self.workers, self.work = preparation, workers, work
        folders = [preparation.folder(part) for part in range(len(preparation.parts))]
        with ThreadPoolExecutor(16) as pool:  # a store takes long to answer
            self.found = list(pool.map(lambda folder: json.loads(read(folder, PART)), folders))
            bounds = list(itertools.pairwise(np.cumsum([0, *(report["kept"] for report in self.found)])))
            items = _new_memmap(work / "items", ITEM, max(1, int(bounds[-1][1])))
            chosen = _new_memmap(work / "chosen", np.dtype(np.uint8), len(items))
            self.items = [items[start:stop] for start, stop in bounds]
            """Items of each part, `ITEM` (n,)."""
            self.chosen = [chosen[start:stop] for start, stop in bounds]
            """Number of the split (see `Preparation`) of a part's items, by their positions, 0 for none, uint8 (n,)."""
            list(pool.map(self._read, self.items, self.chosen, folders))
        n_passes = 1 + len(items) // ITEMS_PER_PASS

        def remove_duplicates(index: int) -> None:
            chosen[find_duplicates(self.items, index, n_passes)] = 0

        if preparation.deduplicate:
            list(run_in_processes(remove_duplicates, range(n_passes), workers))

    def _read(self, items: np.ndarray, chosen: np.ndarray, folder: Folder) -> None:
        end_of_held_out = int(self.preparation.held_out * 256**8).to_bytes(8)
        items[:] = np.frombuffer(read(folder, ITEMS), ITEM)
        chosen[items["position"]] = np.where(items["hash"] < end_of_held_out, 2, 1)

    def write(self) -> dict[str, Any]:
        """Write the caches and the index of each split; return the manifest."""
        preparation, names = self.preparation, [source.name for source in self.preparation.sources]
        n_items = np.sum([np.bincount(of_part, minlength=3) for of_part in self.chosen], axis=0)
        if not n_items[1:].any():
            raise no_rows_left_error(", ".join(names), Report.total(map(Report.from_dict, self.found)))
        if preparation.held_out and not n_items[1:].all():
            selected = "no document; increase" if n_items[1] else "all documents; decrease"
            raise UserError(f"--held_out selects {selected} it, or leave it out")
        splits, sources = {}, {}
        for split, number in preparation.splits.items():
            reports = [self._report(part, number) for part in range(len(self.found))]
            totals = [Report() for _ in names]
            for (source, _), report in zip(preparation.parts, reports, strict=True):
                totals[source].add(report)
            sources[split] = [[name, total.to_dict()] for name, total in zip(names, totals, strict=True)]
            splits[split] = self._write_caches(split, number, reports)
        description = {"kind": preparation.encoding.kind, "encoding": preparation.encoding.identity}
        return {**description, "digest": digest_of(splits), "splits": splits, "sources": sources}

    def _report(self, part: int, split: int) -> Report:
        """Return the counts of a part's items in a split; the others are dropped rows."""
        report, items, chosen = Report.from_dict(self.found[part]), self.items[part], self.chosen[part]
        kept, n_duplicates = items[chosen[items["position"]] == split], int((chosen == 0).sum())
        report.kept, report.tokens = len(kept), int(kept["tokens"].sum())
        report.trained_tokens = int(kept["trained"].sum())
        report.drop_many("duplicate", n_duplicates)
        report.drop_many("other_split", len(items) - len(kept) - n_duplicates)
        return report

    def _write_caches(self, split: str, split_number: int, reports: Sequence[Report]) -> dict[str, Any]:
        """Write the caches and the index of a split, with the reports of its parts; return its counts."""
        preparation, encoding, parts = self.preparation, self.preparation.encoding, range(len(reports))
        groups = [[*parts]] if encoding.kind == "samples" else [[part] for part in parts if reports[part].kept]
        totals = [Report.total(reports[part] for part in group) for group in groups]

        def write_cache(number: int) -> str:
            """Write the items of a group of parts to a cache; return its digest."""
            group = groups[number]
            selections = [(preparation.folder(part), self.chosen[part] == split_number) for part in group]
            with tempfile.TemporaryDirectory(dir=self.work) as temporary:
                folder = Path(temporary) / "cache"
                encoding.select(selections, folder)
                encoding.finish(folder, totals[number], preparation.parts[group[0]][1].name)
                record_blocks(folder)
                digest = bytes_digest((folder / BLOCKS_FILE).read_bytes())
                publish(folder, preparation.place / split / digest, BLOCKS_FILE)
            return digest

        written = sorted(run_in_processes(write_cache, range(len(groups)), self.workers))
        digests = "".join(digest for _, digest in written)
        total, ends = Report.total(totals), np.cumsum([0, *(of_group.tokens for of_group in totals)])
        index = np.vstack([ends[:-1], np.frombuffer(bytes.fromhex(digests), np.int64).reshape(-1, 2).T]).tobytes()
        write(preparation.place, f"{split}.index", index)
        return {"tokens": total.tokens, "items": total.kept, "parts": len(groups), "digest": bytes_digest(index)}


def _new_memmap(path: Path, dtype: "np.dtype[Any]", length: int) -> np.memmap:
    """Map a new file of zeros (length,) into memory. Raise `OSError` if the disk is too full, which would otherwise end
    the process later without a message."""
    with path.open("wb") as file:
        file.truncate(length * dtype.itemsize)
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, length * dtype.itemsize)
    return np.memmap(path, dtype, "r+")


def find_duplicates(parts: Sequence[np.ndarray], index: int = 0, n_passes: int = 1) -> Array:
    """Return the positions of the items that repeat an earlier item of the same hash. A pass compares one of `n_passes`
    ranges of hashes.

    Args:
        parts: each part's items in the order of their hashes, `ITEM` (n,); positions count the items of all parts.
    """
    low, high = (number * 256**HASH_BYTES // n_passes for number in (index, index + 1))
    first, last = low.to_bytes(HASH_BYTES), (high - 1).to_bytes(HASH_BYTES)
    hashes, positions, n_before = [], [], 0
    for items in parts:
        start, stop = np.searchsorted(items["hash"], first), np.searchsorted(items["hash"], last, side="right")
        hashes.append(items["hash"][start:stop])
        positions.append(items["position"][start:stop] + n_before)
        n_before += len(items)
    _, originals = np.unique(np.concatenate(hashes), return_index=True)  # the first of equal hashes
    return np.delete(np.concatenate(positions), originals)


def _remove_parts(place: Folder) -> None:
    parts = place / "parts"
    if parts.exists():
        parts.remove(PART)
    if isinstance(place, LocalFolder):  # folders of killed processes
        for left in (*place.path.glob(".work-*"), *place.path.glob(f"*{UNFINISHED}")):
            shutil.rmtree(left, ignore_errors=True)

"""Merge of a preparation's parts: exact deduplication over all of them, and the manifest.

`manifest.json` has the counts of each source and split, and a digest of the result. `SPLIT/DIGEST/` are caches, one per
part of text, or one for all samples; `SPLIT.index` lists them, see `INDEX_ROWS`.
"""

import itertools
import json
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

INDEX_ROWS = 4
"""Rows of an index, int64 (INDEX_ROWS, caches): first token, first document, and the cache's digest (two rows)."""

ITEMS_PER_PASS = 1 << 24
"""Approximate number of hashes that a process compares at a time, which need about 80 bytes each."""


def merge(preparation: Preparation, workers: int) -> None:
    """Write the items of each split, of equal ones the first, and the manifest; then remove the parts. May be killed
    and repeated. Raise `UserError` if parts are missing, or nothing is left."""
    place = preparation.place
    if missing := preparation.missing():
        raise UserError(
            f"{len(missing):,} of {len(preparation.parts):,} parts in {place} are missing, first {missing[0] + 1}; run "
            "the same command without --merge to write them"
        )
    with preparation.working() as work:
        if not has_file(place, MANIFEST):
            manifest = _write_splits(preparation, workers, work)
            replace(preparation).check()  # lists the sources again
            write(place, MANIFEST, json.dumps(manifest).encode())
        _remove_parts(place)
    manifest = json.loads(read(place, MANIFEST))
    counts = (f"{split}: {of['items']:,} items, {of['tokens']:,} tokens" for split, of in manifest["splits"].items())
    logger.info(f"{place} is complete: {'; '.join(counts)}; digest {manifest['digest']}")


def _write_splits(preparation: Preparation, workers: int, work: Path) -> dict[str, Any]:
    """Write the caches and the index of each split; return the manifest."""
    parts, names = range(len(preparation.parts)), [source.name for source in preparation.sources]
    with ThreadPoolExecutor(16) as pool:  # a store takes long to answer
        metas = list(pool.map(lambda part: json.loads(read(preparation.folder(part), PART)), parts))
    items, chosen = _choose(preparation, [meta["items"] for meta in metas], workers, work)
    n_items = sum(np.bincount(of_part, minlength=3) for of_part in chosen)
    if not n_items[1]:
        raise no_rows_left_error(", ".join(names), Report.total(Report.from_dict(meta["report"]) for meta in metas))
    if preparation.held_out and not n_items[2]:
        raise UserError("--held_out selects no document; increase it, or leave it out")
    splits, sources = {}, {}
    for split, number in preparation.splits.items():
        reports = [_report(meta["report"], *part, number) for meta, *part in zip(metas, items, chosen, strict=True)]
        totals = [Report() for _ in names]
        for meta, report in zip(metas, reports, strict=True):
            totals[meta["source"]].add(report)
        sources[split] = [[name, total.to_dict()] for name, total in zip(names, totals, strict=True)]
        splits[split] = _write_caches(preparation, split, reports, chosen, workers, work)
    description = {"kind": preparation.encoding.kind, "encoding": preparation.encoding.identity}
    return {**description, "digest": digest_of(splits), "splits": splits, "sources": sources}


def _choose(
    preparation: Preparation, counts: Sequence[int], workers: int, work: Path
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the items of each part, `ITEM` (n,), and by their positions the number of the split that each is in, 0 for
    none, uint8 (n,). Both are mapped files in `work`."""
    all_items = np.memmap(work / "items", ITEM, "w+", shape=max(1, sum(counts)))
    all_chosen = np.memmap(work / "chosen", np.uint8, "w+", shape=len(all_items))
    bounds = list(itertools.pairwise(np.cumsum([0, *counts])))
    items, chosen = ([array[start:stop] for start, stop in bounds] for array in (all_items, all_chosen))
    last_held_out = int(preparation.held_out * 256**8).to_bytes(8)
    n_passes = 1 + len(all_items) // ITEMS_PER_PASS

    def copy(part: int) -> None:
        items[part][:] = np.frombuffer(read(preparation.folder(part), ITEMS), ITEM)
        chosen[part][items[part]["position"]] = np.where(items[part]["hash"] < last_held_out, 2, 1)

    def remove_duplicates(index: int) -> None:
        all_chosen[find_duplicates(items, index, n_passes)] = 0

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(copy, range(len(counts))))
    if preparation.deduplicate:
        list(run_in_processes(remove_duplicates, range(n_passes), workers))
    return items, chosen


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


def _report(found: dict[str, Any], items: np.ndarray, chosen: np.ndarray, split: int) -> Report:
    """Return the counts of a part's items in a split; the others are dropped rows."""
    report, kept = Report.from_dict(found), items[chosen[items["position"]] == split]
    report.kept, report.tokens = len(kept), int(kept["tokens"].sum())
    report.trained_tokens = int(kept["trained"].sum())
    n_duplicates = int((chosen == 0).sum())
    report.drop_many("duplicate", n_duplicates)
    report.drop_many("other_split", len(items) - len(kept) - n_duplicates)
    return report


def _write_caches(
    preparation: Preparation,
    split: str,
    reports: Sequence[Report],
    chosen: Sequence[np.ndarray],
    workers: int,
    work: Path,
) -> dict[str, Any]:
    """Write the caches and the index of a split, with the reports of its parts; return its counts."""
    encoding, parts = preparation.encoding, range(len(reports))
    groups = [[*parts]] if encoding.kind == "samples" else [[part] for part in parts if reports[part].kept]
    totals = [Report.total(reports[part] for part in group) for group in groups]

    def write_cache(number: int) -> str:
        """Write the items of a group of parts to a cache; return its digest."""
        group = groups[number]
        selections = [(preparation.folder(part), chosen[part] == preparation.splits[split]) for part in group]
        with tempfile.TemporaryDirectory(dir=work) as temporary:
            folder = Path(temporary) / "cache"
            encoding.select(selections, folder)
            encoding.finish(folder, totals[number], preparation.parts[group[0]][1].name)
            record_blocks(folder)
            digest = bytes_digest((folder / BLOCKS_FILE).read_bytes())
            publish(folder, preparation.place / split / digest, BLOCKS_FILE)
        return digest

    digests = dict(run_in_processes(write_cache, range(len(groups)), workers))
    counts = np.array([[total.tokens, total.kept] for total in totals])
    index = np.zeros((INDEX_ROWS, len(groups)), np.int64)
    index[:2, 1:] = counts.cumsum(axis=0)[:-1].T
    in_order = bytes.fromhex("".join(digests[number] for number in range(len(groups))))
    index[2:] = np.frombuffer(in_order, np.int64).reshape(-1, 2).T
    write(preparation.place, f"{split}.index", index.tobytes())
    tokens, items = counts.sum(axis=0).tolist()
    return {"tokens": tokens, "items": items, "parts": len(groups), "digest": bytes_digest(index.tobytes())}


def _remove_parts(place: Folder) -> None:
    parts = place / "parts"
    if parts.exists():
        parts.remove(PART)
    if isinstance(place, LocalFolder):  # folders of killed processes
        for left in (*place.path.glob(".work-*"), *place.path.glob(f"*{UNFINISHED}")):
            shutil.rmtree(left, ignore_errors=True)

"""Merge of a preparation's parts: exact deduplication over all of them, and the manifest.

`manifest.json` has the counts of each source and split, and a digest of the result. `SPLIT.index` lists the parts of a
token cache in order, see `INDEX_ROWS`. Samples become one cache, `SPLIT/`.
"""

import itertools
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.components.checkpoint.filesystem import UNFINISHED, LocalFolder
from torchtitan.components.data.disk_cache import BLOCKS_FILE, bytes_digest, digest_of
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.prepare.encoding import HASHES
from torchtitan.components.data.prepare.parts import (
    MANIFEST,
    TRAIN,
    VALIDATION,
    Preparation,
    local_copy,
    publish,
    read,
    run_in_processes,
    write,
)
from torchtitan.components.data.report import Report, no_rows_left_error
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

INDEX_ROWS = 5
"""Rows of an index, int64 (INDEX_ROWS, parts): first token, first document, twice the part's number (plus 1 if it was
rewritten without duplicates), and its digest (two rows)."""

UNIQUE = ".unique"
"""Suffix of a split's folder without duplicates."""

ITEMS_PER_PASS = 1 << 26
"""Approximate number of hashes compared at a time, which need about 50 bytes each."""


def merge(preparation: Preparation, workers: int) -> None:
    """Remove duplicates, keeping the first item, and write the manifest. May be killed and repeated. Raise `UserError`
    if parts are missing, or nothing is left."""
    place, n_parts = preparation.place, len(preparation.parts)
    if preparation.is_complete():
        _remove_replaced(preparation)
        logger.info(f"{place} is already complete")
        return
    if missing := preparation.missing():
        raise UserError(
            f"{len(missing):,} of {n_parts:,} parts in {place} are missing, first {missing[0] + 1}; run the same "
            "command without --merge to write them"
        )
    with ThreadPoolExecutor(16) as pool:
        metas = list(pool.map(preparation.meta, range(n_parts)))
    reports = [Report() for _ in preparation.sources]
    for meta in metas:
        reports[meta["source"]].add(Report.from_dict(meta["report"]))
    with preparation.writing(), preparation.work_folder() as work:
        splits = {}
        for split in preparation.splits:
            entries = _without_duplicates(preparation, split, [meta["splits"][split] for meta in metas], work, workers)
            for meta, final in zip(metas, entries, strict=True):
                _count(reports[meta["source"]], meta["splits"][split], final, split)
            if preparation.encoding.kind == "samples":
                splits[split] = _write_samples(preparation, split, entries, reports, work / split)
            else:
                splits[split] = _write_index(preparation, split, entries)
        if not splits[TRAIN]["tokens"]:
            raise no_rows_left_error(", ".join(source.name for source in preparation.sources), Report.total(reports))
        if not all(of["items"] for of in splits.values()):
            raise UserError("--held_out selects no document; increase it, or leave it out")
        manifest = {
            "version": 1,
            "kind": preparation.encoding.kind,
            "encoding": preparation.encoding.identity,
            "digest": digest_of(splits),
            "splits": splits,
            "sources": [
                {"name": source.name, "report": report.to_dict()}
                for source, report in zip(preparation.sources, reports, strict=True)
            ],
        }
        preparation.check_unchanged()
        write(place, MANIFEST, json.dumps(manifest).encode())
    _remove_replaced(preparation)
    counts = "; ".join(f"{split}: {of['items']:,} items, {of['tokens']:,} tokens" for split, of in splits.items())
    logger.info(f"prepared {place}: {counts}; digest {manifest['digest']}")


def _count(report: Report, before: dict[str, Any], final: dict[str, Any], split: str) -> None:
    """Add a part's items to the report of its source, which counts held-out items as dropped."""
    report.drop_many("duplicate", before["items"] - final["items"])
    if split == VALIDATION:
        report.drop_many("held_out", final["items"])
    else:
        report.kept += final["items"]
        report.tokens += final["tokens"]
        report.trained_tokens += final["trained"]


def _without_duplicates(
    preparation: Preparation, split: str, entries: Sequence[dict[str, Any]], work: Path, workers: int
) -> list[dict[str, Any]]:
    """Rewrite the parts that have duplicates; return the entry of each part."""
    first = np.cumsum([0, *(of_part["items"] for of_part in entries)])
    n_items = int(first[-1])
    keep = np.memmap(work / f"{split}.keep", bool, "w+", shape=max(1, n_items))
    keep[:] = True
    if preparation.deduplicate:
        hashes = np.memmap(work / f"{split}.hashes", np.uint64, "w+", shape=(max(1, n_items), 2))

        def copy(number: int) -> None:  # since each pass scans them, and a store takes long to answer
            content = read(preparation.folder(number) / split, HASHES)
            hashes[first[number] : first[number + 1]] = np.frombuffer(content, np.uint64).reshape(-1, 2)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(copy, range(len(entries))))
        n_passes = 1 + n_items // ITEMS_PER_PASS
        for index in range(n_passes):
            parts = (hashes[start:stop] for start, stop in itertools.pairwise(first))
            keep[find_duplicates(parts, index, n_passes)] = False

    def rewrite(number: int) -> dict[str, Any]:
        encoding, folder = preparation.encoding, preparation.folder(number)
        selected, name = keep[first[number] : first[number + 1]], preparation.parts[number][1].name
        with local_copy(folder / split) as path, tempfile.TemporaryDirectory(dir=work) as temporary:
            target = Path(temporary) / "complete"
            final = encoding.join([(path, selected)], Report(), target, name)
            publish(target, folder / f"{split}{UNIQUE}", BLOCKS_FILE)
        return final

    numbers = [number for number in range(len(entries)) if not keep[first[number] : first[number + 1]].all()]
    rewritten = dict(run_in_processes(rewrite, numbers, workers))
    return [{**rewritten.get(n, before), "rewritten": n in rewritten} for n, before in enumerate(entries)]


def find_duplicates(parts: Iterable[np.ndarray], index: int = 0, n_passes: int = 1) -> Array:
    """Return the positions of the items that repeat an earlier item of the same hash. A pass compares the hashes whose
    remainder by `n_passes` is `index`.

    Args:
        parts: hashes of each part's items, uint64 (n, 2); positions count the items of all parts.
    """
    hashes, positions, n_before = [], [], 0
    for of_part in parts:
        selected = np.flatnonzero(of_part[:, 1] % np.uint64(n_passes) == index)
        hashes.append(of_part[selected])
        positions.append(selected + n_before)
        n_before += len(of_part)
    all_hashes, all_positions = np.concatenate(hashes), np.concatenate(positions)
    order = np.lexsort(all_hashes.T)  # stable: equal hashes keep the order of their items
    ordered = all_hashes[order]
    repeated: Array = all_positions[order[1:]][(ordered[1:] == ordered[:-1]).all(axis=1)]
    return repeated


def _write_index(preparation: Preparation, split: str, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write the index of the parts that have tokens; return the counts of the split."""
    used = np.array([number for number, of_part in enumerate(entries) if of_part["tokens"]], np.int64)
    index = np.zeros((INDEX_ROWS, len(used)), np.int64)
    totals = {}
    for row, count in enumerate(("tokens", "items")):
        ends = np.cumsum([entries[number][count] for number in used], dtype=np.int64)
        index[row, 1:] = ends[:-1]
        totals[count] = int(ends[-1]) if len(ends) else 0
    index[2] = 2 * used + [entries[number]["rewritten"] for number in used]
    digests = b"".join(bytes.fromhex(entries[number]["digest"]) for number in used)
    index[3:] = np.frombuffer(digests, np.int64).reshape(-1, 2).T
    write(preparation.place, f"{split}.index", index.tobytes())
    return {**totals, "parts": len(used), "digest": bytes_digest(index.tobytes())}


def _write_samples(
    preparation: Preparation, split: str, entries: Sequence[dict[str, Any]], reports: Sequence[Report], work: Path
) -> dict[str, Any]:
    """Join the parts to one cache; return the counts of the split."""
    report = Report.total(reports)
    if split == VALIDATION:
        report = Report(report.format, rows=sum(of_part["items"] for of_part in entries))
    with ExitStack() as stack:
        selections = []
        for number, of_part in enumerate(entries):
            folder = preparation.folder(number) / (split + UNIQUE * of_part["rewritten"])
            selections.append((stack.enter_context(local_copy(folder)), np.ones(of_part["items"], bool)))
        final = preparation.encoding.join(selections, report, work, split)
    publish(work, preparation.place / split, BLOCKS_FILE)
    return final


def _remove_replaced(preparation: Preparation) -> None:
    """Remove all folders that a complete preparation does not need."""
    parts = preparation.place / "parts"
    if preparation.encoding.kind == "samples":
        if parts.exists():
            parts.remove(BLOCKS_FILE)
    else:
        files = parts.files()
        for name in files:
            replaced = name.removesuffix(f"{UNIQUE}/{BLOCKS_FILE}")
            if replaced != name and f"{replaced}/{BLOCKS_FILE}" in files:
                (parts / replaced).remove(BLOCKS_FILE)
    if isinstance(preparation.place, LocalFolder):
        for pattern in (".work-*", f"*{UNFINISHED}", f"parts/*/*{UNFINISHED}"):  # of killed processes
            for left in preparation.place.path.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)

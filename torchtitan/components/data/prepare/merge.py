"""Merge of the parts of a preparation, with deduplication over all of them, and selection by
score."""

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from torchtitan.components.checkpoint.filesystem import UNFINISHED, Folder, LocalFolder
from torchtitan.components.data.disk_cache import BLOCKS_FILE, readable, record_blocks
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.prepare.encoding import (
    HASH_BYTES,
    ITEM,
    read_json,
    read_part,
    rows_of,
)
from torchtitan.components.data.prepare.near_duplicates import repeated
from torchtitan.components.data.prepare.preparation import (
    BANDS,
    DUPLICATE,
    FATES,
    ITEMS,
    LOW_SCORE,
    MANIFEST,
    NEAR_DUPLICATE,
    OF_TRAIN,
    OF_VALIDATION,
    PART,
    PLAN,
    SCORES,
    TRAIN,
    VALIDATION,
    WORK,
    Manifest,
    Preparation,
    SplitCounts,
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
from torchtitan.tools.progress import progress

ITEMS_PER_PASS = 1 << 24
"""Approximate number of hashes that a process compares at a time, which need about 90 bytes
each."""

_PARTS_AT_A_TIME = 256
"""Parts whose hashes are in memory while they are copied."""


def merge(preparation: Preparation, workers: int) -> None:
    """Write the items of each split, of equal ones the first, and the manifest; then remove the
    parts. May be killed and repeated. Raise `UserError` if parts are missing or damaged, a split is
    empty, or the plan or the sources have changed."""
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
            merging = _Merge(preparation, workers, work)
            manifest = merging.write()
            merging.write_scores()
            replace(preparation).check()
            write_file(place, MANIFEST, json.dumps(manifest).encode(), work)
    with os_errors_as(f"{place} is complete, but its parts cannot be removed"):
        _remove_parts(place)
    with readable(place, "; remove it, and prepare the data again"):
        manifest = json.loads(read_json(place, MANIFEST))
        counts = "; ".join(
            f"{split}: {of['items']:,} items, {of['tokens']:,} tokens"
            for split, of in manifest["splits"].items()
        )
        logger.info(f"{place} is complete: {counts}; digest {manifest['digest']}")


class _Merge:
    """The items of all parts, in files in the folder `work`."""

    def __init__(self, preparation: Preparation, workers: int, work: Path):
        self.preparation = preparation
        self.workers = workers
        self.work = work
        self.splits = {TRAIN: OF_TRAIN}
        if preparation.held_out:
            self.splits[VALIDATION] = OF_VALIDATION
        self.folders = [preparation.folder(part) for part in range(len(preparation.parts))]
        with ThreadPoolExecutor(16) as pool:  # a store takes long to answer
            reports = pool.map(lambda folder: json.loads(read_part(folder, PART)), self.folders)
            self.found = list(map(Report.from_dict, reports))
        self._copy(ITEMS)
        if not any(report.kept for report in self.found):
            raise no_rows_left_error(
                ", ".join(of.name for of in preparation.sources), Report.total(self.found)
            )
        ends = np.cumsum([report.samples for report in self.found])
        self.all_items = np.memmap(work / ITEMS, ITEM, "r+")
        self.items = np.split(self.all_items, ends[:-1])
        """Items of each part, `ITEM` (n,); dropped ones are in no split."""
        self.n_passes = 1 + len(self.all_items) // ITEMS_PER_PASS
        if preparation.deduplicate:
            list(run_in_processes(self._drop_duplicates, range(self.n_passes), workers))
        if preparation.near_duplicates:
            self._copy(BANDS)
            n_calls = preparation.near_duplicates.n_bands * self.n_passes
            with progress("comparing bands", n_calls) as advance:
                for _ in run_in_processes(self._drop_near_duplicates, range(n_calls), workers):
                    advance(1)
        if preparation.keep_best:
            self._drop_low_scores(preparation.keep_best)

    def _copy(self, name: str) -> None:
        """Copy a file of all parts to one in the folder `work`."""
        with ThreadPoolExecutor(16) as pool, durable.new_file(self.work / name) as file:
            for first in range(0, len(self.folders), _PARTS_AT_A_TIME):
                folders = self.folders[first : first + _PARTS_AT_A_TIME]
                file.writelines(pool.map(partial(read_part, name=name), folders))

    def _drop_duplicates(self, index: int) -> None:
        found = find_duplicates(self.items, index, self.n_passes)
        self.all_items["split"][found] = DUPLICATE

    def _drop_near_duplicates(self, call: int) -> None:
        """Drop the items that have a band of an earlier item, of one band and one range of
        hashes."""
        assert self.preparation.near_duplicates
        band, index = divmod(call, self.n_passes)
        low, high = (number * 2**64 // self.n_passes for number in (index, index + 1))
        file = np.memmap(self.work / BANDS, np.uint64, "r")
        n_bands, n_before = self.preparation.near_duplicates.n_bands, 0
        hashes, order = [], []
        indices = []
        for part, items in enumerate(self.items):
            of_part = file[n_before * n_bands :][: len(items) * n_bands].reshape(n_bands, -1)[band]
            chosen = np.flatnonzero((of_part >= low) & (of_part <= high - 1))
            hashes.append(of_part[chosen])
            order.append((part << 40) + items["number"][chosen])
            indices.append(chosen + n_before)
            n_before += len(items)
        found = np.concatenate(indices)[repeated(np.concatenate(hashes), np.concatenate(order))]
        fates = self.all_items["split"]
        fates[found[fates[found] != DUPLICATE]] = NEAR_DUPLICATE

    def _drop_low_scores(self, fraction: float) -> None:
        """Keep the best items of the two splits; equal scores have one fate."""
        is_left = np.isin(self.all_items["split"], (OF_TRAIN, OF_VALIDATION))
        scores = self.all_items["score"][is_left]
        n_kept = max(1, round(fraction * len(scores)))
        least = np.partition(scores, len(scores) - n_kept)[len(scores) - n_kept]
        is_low = is_left & (self.all_items["score"] < least)
        self.all_items["split"][is_low] = LOW_SCORE
        n_left, n_low = int(is_left.sum()), int(is_low.sum())
        logger.info(f"scores of at least {least:.4g}: {n_left - n_low:,} of {n_left:,} documents")

    def write_scores(self) -> None:
        """Write a table of the scores and fates of each part's documents."""
        if not self.preparation.encoding.has_scores:
            return
        import pyarrow as pa
        from pyarrow import parquet

        folder = self.preparation.place / SCORES
        folder.create()
        for part, items in enumerate(self.items):
            in_order = np.sort(items, order="number")
            columns = {
                "part": [self.preparation.parts[part][1].name] * len(items),
                "document": in_order["number"] + 1,
                "score": in_order["score"],
                "fate": np.array(FATES)[in_order["split"]],
            }
            file = io.BytesIO()
            parquet.write_table(pa.table(columns), file)
            write_file(folder, f"{part:06}.parquet", file.getvalue(), self.work)

    def write(self) -> Manifest:
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
        manifest = Manifest(
            kind=encoding.kind,
            encoding=encoding.identity,
            digest=digest_of(splits),
            splits=splits,
            sources=sources,
        )
        return {**manifest, "manifest": digest_of(manifest)}

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
        in_splits = np.isin(items["split"], (OF_TRAIN, OF_VALIDATION))
        others = {*rows[in_splits & (items["split"] != self.splits[split])].tolist()} - kept_rows
        counted, counts = kept_rows | others, {}
        for fate in (DUPLICATE, NEAR_DUPLICATE, LOW_SCORE):
            of_fate = {*rows[items["split"] == fate].tolist()} - counted
            counted |= of_fate
            if of_fate or fate == DUPLICATE:
                counts[FATES[fate]] = len(of_fate)
        counts["other_split"] = len(others)
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

    def _write_caches(self, split: str, reports: Sequence[Report]) -> SplitCounts:
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

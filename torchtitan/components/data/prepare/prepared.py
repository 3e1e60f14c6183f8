"""Data written by `torchtitan data prepare`: token caches of any number of parts, local or in a store, read as one
stream; and sample caches."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.components.checkpoint.filesystem import Folder, LocalFolder, folder_at
from torchtitan.components.checkpoint.identity import identify_content
from torchtitan.components.data.disk_cache import (
    BLOCKS_FILE,
    SAMPLED_BLOCKS,
    bytes_digest,
    check_blocks,
    check_digest,
    digest_of,
    evenly_spaced,
    map_array,
    readable,
)
from torchtitan.components.data.finetuning.chat_encoding import RowEncoder
from torchtitan.components.data.finetuning.sample_cache import SampleCache
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.prepare.merge import INDEX_ROWS, UNIQUE
from torchtitan.components.data.prepare.parts import MANIFEST, PLAN, TRAIN, VALIDATION, has_file, read
from torchtitan.components.data.pretraining.tokens import ArrayTokens, JoinedTokens
from torchtitan.components.data.report import Report
from torchtitan.components.data.sources.block_cache import BlockCache
from torchtitan.components.data.sources.paths import location
from torchtitan.components.data.sources.source import CHAT_DATASETS, Catalog
from torchtitan.components.data.sources.stored import with_patience
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError


class Prepared:
    """The manifest of a complete preparation. Raise `UserError` if it is damaged."""

    def __init__(self, place: str):
        self.place, self.folder = place, folder_at(os.path.expanduser(place))
        with readable(self.folder):
            manifest = json.loads(read(self.folder, MANIFEST))
            self.kind: str = manifest["kind"]
            self.encoding: dict[str, Any] = manifest["encoding"]
            self.digest = check_digest(manifest["digest"])
            self.splits: dict[str, dict[str, Any]] = manifest["splits"]
            self.reports = {of["name"]: Report.from_dict(of["report"]) for of in manifest["sources"]}
            if digest_of(self.splits) != self.digest:
                raise ValueError(f"{MANIFEST} does not match its digest")

    def check(self, split: str, kind: str, encoding: dict[str, Any]) -> None:
        """Raise `UserError` unless the data has this split and is of this kind, encoded in this way by any filters."""
        if split not in self.splits:
            raise UserError(f"{self.place} has no split {split!r}; use one of: {', '.join(self.splits)}")
        encoding = json.loads(json.dumps(encoding))
        if self.kind != kind:
            raise UserError(f"{self.place} holds {self.kind}, but this configuration reads {kind}")
        if changed := [name for name in encoding if name != "filters" and encoding[name] != self.encoding.get(name)]:
            raise UserError(
                f"{self.place} was prepared with another {' and '.join(changed)}; prepare the data again in a new "
                "folder with the options of this run"
            )


def find_prepared(dataset: str, catalog: Catalog[Any]) -> Prepared | None:
    """Return the preparation at a path or URL; None if there is none, or the dataset is a name in the catalog. Raise
    `UserError` if it is not complete."""
    if not dataset or dataset in catalog.names():
        return None
    folder = folder_at(os.path.expanduser(dataset))
    if isinstance(folder, LocalFolder) and not folder.exists():
        return None
    if not has_file(folder / "plan", PLAN):
        if isinstance(folder, LocalFolder):
            _reject_part(folder.path.absolute())
        return None
    if not has_file(folder, MANIFEST):
        raise UserError(f"the preparation in {dataset} is not complete; run torchtitan data prepare again to continue")
    return Prepared(dataset)


def _reject_part(folder: Path) -> None:
    for outer in folder.parents:
        is_part = folder.relative_to(outer).parts[0] in ("parts", "plan", TRAIN, VALIDATION)
        if is_part and (outer / "plan" / PLAN).is_file():
            raise UserError(f"{folder} is part of prepared data; use {outer}")


class PreparedTokens(JoinedTokens):
    """One split of a prepared token cache. Neither the index nor the parts are read as a whole, unless `verify`.

    Args:
        prepared: the manifest.
        split: split to read.
        blocks: cache of blocks of data in a store; its folder also holds a copy of the index.
        verify: verify all checksums instead of a sample of 16 parts.
    """

    def __init__(self, prepared: Prepared, split: str, blocks: BlockCache, *, verify: bool = False):
        entry, folder, name = prepared.splits[split], prepared.folder, f"{split}.index"
        self.is_remote = not isinstance(folder, LocalFolder)
        with readable(prepared.folder):
            shape = (INDEX_ROWS, int(entry["parts"]))
            if not isinstance(folder, LocalFolder):
                digest, index_folder = check_digest(entry["digest"]), LocalFolder(blocks.root / "indexes")
                if not index_folder.has_file(f"{digest}.index"):
                    _copy_index(folder, name, digest, index_folder)
                folder, name = index_folder, f"{digest}.index"
            index = map_array(folder.path / name, "int64", shape[0] * shape[1]).reshape(shape)
            if verify and bytes_digest(index.tobytes()) != entry["digest"]:
                raise ValueError(f"{name} does not match its digest")
            for number in range(shape[1]) if verify else evenly_spaced(shape[1], SAMPLED_BLOCKS):
                _check_part(prepared.folder, split, index[:, number], verify)
        super().__init__(
            f"{prepared.digest}-{split}", index[0], entry["tokens"], partial(_open, prepared, split, index, blocks)
        )
        self._arguments = (prepared, split, blocks)
        self.sources = prepared.reports

    def report(self) -> Report:
        return Report.total(self.sources.values())


def find_samples(dataset: str, split: str, encoder: RowEncoder, *, verify: bool = False) -> SampleCache | None:
    """Open a prepared sample cache; None if the dataset is not prepared. Raise `UserError` if it is damaged, in a
    store, or encoded differently."""
    if (prepared := find_prepared(dataset, CHAT_DATASETS)) is None:
        return None
    prepared.check(split, "samples", {"encoder": encoder.fingerprint})
    if not isinstance(prepared.folder, LocalFolder):
        raise UserError(f"{dataset}: prepared samples must be in a local folder; copy them, and set the path")
    folder = prepared.folder / split
    with readable(folder):
        if bytes_digest(folder.read(BLOCKS_FILE)) != prepared.splits[split]["digest"]:
            raise ValueError(f"{BLOCKS_FILE} does not match the digest in {MANIFEST}")
        check_blocks(folder, verify)
    return SampleCache(folder.path, encoder.n_parts, encoder.has_answers)


def _copy_index(folder: Folder, name: str, digest: str, target: LocalFolder) -> None:
    """Copy an index to `DIGEST.index`; other processes may do the same."""
    content = read(folder, name)
    if bytes_digest(content) != digest:
        raise ValueError(f"{name} does not match its digest")
    target.create()
    with tempfile.TemporaryDirectory(dir=target) as temporary:
        copy = Path(temporary) / name
        copy.write_bytes(content)
        durable.replace(copy, target.path / f"{digest}.index")


def _part_folder(folder: Folder, split: str, row: Array) -> Folder:
    number, rewritten = divmod(int(row[2]), 2)
    return folder / "parts" / f"{number:06}" / (split + UNIQUE * rewritten)


def _check_part(folder: Folder, split: str, row: Array, verify: bool) -> None:
    part = _part_folder(folder, split, row)
    with readable(part):
        if bytes.fromhex(bytes_digest(read(part, BLOCKS_FILE))) != row[3:].tobytes():
            raise ValueError(f"{BLOCKS_FILE} does not match the digest in the index")
        with_patience(f"verifying {part}", lambda: check_blocks(part, verify))


def _open(prepared: Prepared, split: str, index: Array, blocks: BlockCache, number: int) -> ArrayTokens:
    """Open a part of the index by its place in it."""
    folder = _part_folder(prepared.folder, split, index[:, number])
    with readable(folder):
        meta = json.loads(read(folder, "meta.json"))
        [n_documents] = meta["documents_per_part"]
        tokens: Any
        offsets: Any
        if isinstance(folder, LocalFolder):
            tokens = map_array(folder.path / "tokens.bin", meta["dtype"], meta["n_tokens"])
            offsets = map_array(folder.path / "offsets.bin", "int64", n_documents + 1)
        else:
            version = f"{prepared.digest} {folder}"
            tokens = _StoredArray(folder, "tokens.bin", np.dtype(meta["dtype"]), meta["n_tokens"], version, blocks)
            offsets = _StoredArray(folder, "offsets.bin", np.dtype("int64"), n_documents + 1, version, blocks)[:]
        return ArrayTokens(str(number), tokens, offsets, meta["names"], [n_documents])


class _StoredArray:
    """An array in a store, of which slices are read. `version` names the folder's content in the cache."""

    def __init__(
        self, folder: Folder, name: str, dtype: "np.dtype[Any]", length: int, version: str, blocks: BlockCache
    ):
        self._folder, self._name, self._dtype, self._length = folder, name, dtype, length
        self._version, self._blocks = version, blocks

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice) -> Array:
        start, stop, _ = (index * self._dtype.itemsize for index in span.indices(self._length))
        name, size = f"{self._version}/{self._name}", self._length * self._dtype.itemsize
        return np.frombuffer(self._blocks.read(name, size, start, stop, self._fetch), self._dtype)

    def _fetch(self, start: int, stop: int) -> bytes:
        what = f"reading {self._folder}/{self._name} at offset {start:,}"
        content = with_patience(what, lambda: self._folder.read_range(self._name, start, stop))
        if len(content) != stop - start:
            raise UserError(f"{what}: the file ends after {len(content):,} bytes; copy or prepare the data again")
        return content


def splits_of(dataset: str, catalog: Catalog[Any]) -> tuple[str, ...]:
    """Return the splits of a dataset string, which may be a preparation."""
    found = find_prepared(dataset, catalog)
    return tuple(found.splits) if found else catalog.splits(dataset)


def dataset_identity(datasets: Sequence[str], digest: Callable[[str], str], catalog: Catalog[Any]) -> dict[str, str]:
    """Return the identity of datasets for the run's identity: their content, or their names if the content of one is
    unknown. `digest` returns the digest of data that is not prepared."""
    prepared = [find_prepared(dataset, catalog) for dataset in datasets]
    digests = [of.digest if of else digest(name) for name, of in zip(datasets, prepared, strict=True)]
    joined = digests[0] if len(digests) == 1 else digest_of(digests)
    return identify_content(", ".join(map(location, datasets)), joined if all(digests) else "")

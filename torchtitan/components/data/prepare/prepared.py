"""Data written by `torchtitan data prepare`: token caches of any number of parts, local or in a
store, read as one stream; and sample caches."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from torchtitan.components.checkpoint.filesystem import Folder, LocalFolder, folder_at
from torchtitan.components.checkpoint.identity import identify_content
from torchtitan.components.data import disk_cache
from torchtitan.components.data.finetuning.row_encoder import RowEncoder
from torchtitan.components.data.finetuning.sample_cache import SampleCache
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.prepare.encoding import read, read_json
from torchtitan.components.data.prepare.preparation import (
    INDEX_ROWS,
    MANIFEST,
    PLAN,
    TRAIN,
    VALIDATION,
    Manifest,
    has_file,
)
from torchtitan.components.data.pretraining.tokens import ArrayTokens, JoinedTokens, Numbers
from torchtitan.components.data.report import Report
from torchtitan.components.data.sources.block_cache import BlockCache
from torchtitan.components.data.sources.paths import location
from torchtitan.components.data.sources.source import CHAT_DATASETS, AnyCatalog
from torchtitan.components.data.sources.stored import with_patience
from torchtitan.tools import durable
from torchtitan.tools.digests import bytes_digest, check_digest, digest_of
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import named_file, regular_file, without_query
from torchtitan.tools.logging import logger

_REMEDY = "; prepare the data again in a new folder"


class Prepared:
    """The manifest of a complete preparation. Raise `UserError` if it is damaged."""

    def __init__(self, place: str):
        self.place, self.folder = place, folder_at(os.path.expanduser(place))
        with disk_cache.readable(self.folder, _REMEDY):
            manifest: Manifest = json.loads(read_json(self.folder, MANIFEST))
            self.kind = manifest["kind"]
            self.encoding = manifest["encoding"]
            self.digest = manifest["digest"]
            self.splits = manifest["splits"]
            self.sources = {
                split: [(name, Report.from_dict(report)) for name, report in of_split]
                for split, of_split in manifest["sources"].items()
            }
            """Names and counts of the sources in each split."""
            _checked(json.dumps(self.splits).encode(), self.digest, MANIFEST)
            if digest := manifest.pop("manifest", None):  # not of earlier versions
                _checked(json.dumps(manifest).encode(), digest, MANIFEST)

    def check(self, split: str, kind: str, encoding: Mapping[str, object]) -> None:
        """Raise `UserError` unless the data has this split and is of this kind, encoded in this way
        by any filters."""
        if split not in self.splits:
            raise UserError(
                f"{self.place} has no split {split!r}; use one of: {', '.join(self.splits)}"
            )
        if self.kind != kind:
            raise UserError(
                f"{self.place} holds {self.kind}, but this configuration reads {kind}{_REMEDY} "
                "with it"
            )
        if changed := [
            name
            for name in encoding
            if name != "filters" and encoding[name] != self.encoding.get(name)
        ]:
            names = " and ".join(changed)
            raise UserError(
                f"{self.place} was prepared with another {names}{_REMEDY} with the options of this "
                "run"
            )

    def index(self, split: str, copies: Path, *, verify: bool) -> Array:
        """Map the index of a split into memory, see `INDEX_ROWS`, or its copy in the folder
        `copies` if it is in a store; other processes may copy it too. Verify the index, and the
        digests of 16 caches, or of all."""
        name, n = f"{split}.index", int(self.splits[split]["parts"])
        with disk_cache.readable(self.folder, _REMEDY):
            digest = check_digest(self.splits[split]["digest"])
            path = Path(f"{self.folder}/{name}")
            if not isinstance(self.folder, LocalFolder):
                path = self._copy(name, digest, copies)
            index = disk_cache.map_array(path, "int64", INDEX_ROWS * n).reshape(INDEX_ROWS, n)
            _checked(index.tobytes(), digest, name)
        for number in (
            range(n) if verify else disk_cache.evenly_spaced(n, disk_cache.SAMPLED_BLOCKS)
        ):
            cache = self.cache(split, index, number)
            with disk_cache.readable(cache, _REMEDY):
                _checked(
                    read_json(cache, disk_cache.BLOCKS_FILE), cache.name, disk_cache.BLOCKS_FILE
                )
                with_patience(f"verifying {cache}", partial(disk_cache.check_blocks, cache, verify))
        return index

    def _copy(self, name: str, digest: str, copies: Path) -> Path:
        """Return the path of a local copy of an index. Replace a damaged one, with a warning."""
        path = copies / f"{digest}.index"
        if regular_file(path).exists():
            if bytes_digest(path.read_bytes()) == digest:
                return path
            logger.warning("%s is damaged; it is copied again from %s", path, self.folder)
        durable.make_folder(copies)
        with tempfile.TemporaryDirectory(dir=copies) as temporary:
            copy = Path(temporary) / name
            with durable.new_file(copy) as file:
                file.write(_checked(read(self.folder, name), digest, name))
            durable.replace(copy, path)
        return path

    def cache(self, split: str, index: Array, number: int) -> Folder:
        """Return the folder of a cache of the index."""
        return self.folder / split / index[1:, number].tobytes().hex()


def _checked(content: bytes, digest: str, name: str) -> bytes:
    if bytes_digest(content) != digest:
        raise ValueError(f"{name} does not match its digest")
    return content


def find_prepared(dataset: str, catalog: AnyCatalog) -> Prepared | None:
    """Return the preparation at a path or URL; None for other content, or if the dataset is a name
    in the catalog. Raise `UserError` if it is not complete."""
    is_file = without_query(dataset) != dataset  # a name after a query is not a file name
    if not dataset or dataset in catalog.names() or is_file:
        return None
    folder = folder_at(os.path.expanduser(dataset))
    if not has_file(folder / "plan", PLAN):
        if isinstance(folder, LocalFolder):
            _reject_part(folder.path.absolute())
        return None
    if not has_file(folder, MANIFEST):
        raise UserError(
            f"the preparation in {dataset} is not complete; run torchtitan data prepare again to "
            "continue"
        )
    return Prepared(dataset)


def _reject_part(folder: Path) -> None:
    for outer in folder.parents:
        is_part = folder.relative_to(outer).parts[0] in ("parts", "plan", TRAIN, VALIDATION)
        if is_part and (outer / "plan" / PLAN).is_file():
            raise UserError(f"{folder} is part of prepared data; use {outer}")


class PreparedTokens(JoinedTokens):
    """One split of a prepared token cache. Neither the index nor the parts are read as a whole,
    unless `verify`.

    Args:
        prepared: the manifest.
        split: split to read.
        blocks: cache of blocks of data in a store; its folder also holds a copy of the index.
        verify: verify all checksums instead of a sample of 16 parts.
    """

    def __init__(self, prepared: Prepared, split: str, blocks: BlockCache, *, verify: bool = False):
        index = prepared.index(split, blocks.root / "indexes", verify=verify)
        open_cache = partial(_open, prepared, split, index, blocks)
        super().__init__(
            f"{prepared.digest}-{split}", index[0], prepared.splits[split]["tokens"], open_cache
        )
        self._arguments = (prepared, split, blocks)
        self.sources = prepared.sources[split]
        self.is_remote = not isinstance(prepared.folder, LocalFolder)


def find_samples(
    dataset: str, split: str, encoder: RowEncoder, *, verify: bool = False
) -> SampleCache | None:
    """Open a prepared sample cache; None if the dataset is not prepared. Raise `UserError` if it is
    damaged, in a store, or encoded differently."""
    if (prepared := find_prepared(dataset, CHAT_DATASETS)) is None:
        return None
    prepared.check(split, "samples", {"encoder": encoder.fingerprint})
    if not isinstance(prepared.folder, LocalFolder):
        raise UserError(
            f"{dataset}: prepared samples must be in a local folder; copy them, and set the path"
        )
    cache = prepared.cache(split, prepared.index(split, prepared.folder.path, verify=verify), 0)
    _check_inside(prepared.folder, cache)
    return SampleCache(Path(str(cache)), encoder.n_parts, encoder.stored)


def _check_inside(outer: Folder, cache: Folder) -> None:
    """Raise `UserError` if a folder of prepared data is a link out of the preparation."""
    if isinstance(outer, LocalFolder) and isinstance(cache, LocalFolder):
        named_file(
            outer.path, f"{cache.path.relative_to(outer.path)}/meta.json", f"{outer}/{MANIFEST}"
        )


def _open(
    prepared: Prepared, split: str, index: Array, blocks: BlockCache, number: int
) -> ArrayTokens:
    """Open a cache by its number in the index."""
    folder = prepared.cache(split, index, number)
    _check_inside(prepared.folder, folder)

    def array(name: str, dtype: str, length: int) -> Numbers:
        if isinstance(folder, LocalFolder):
            return disk_cache.map_array(folder.path / name, dtype, length)
        return _StoredArray(folder, name, np.dtype(dtype), length, blocks)

    with disk_cache.readable(folder, _REMEDY):
        meta = json.loads(read_json(folder, "meta.json"))
        [n_documents] = meta["documents_per_part"]
        tokens = array("tokens.bin", meta["dtype"], meta["n_tokens"])
        offsets = array("offsets.bin", "int64", n_documents + 1)[:]
        return ArrayTokens(f"{folder}/tokens.bin", tokens, offsets, meta["names"], [n_documents])


@dataclass(frozen=True)
class _StoredArray:
    """An array in a store, read in slices. The folder's name identifies its content in the
    cache."""

    folder: Folder
    name: str
    dtype: "np.dtype[np.generic]"
    length: int
    blocks: BlockCache

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, span: slice) -> Array:
        start, stop, _ = (index * self.dtype.itemsize for index in span.indices(self.length))
        name, size = f"{self.folder}/{self.name}", self.length * self.dtype.itemsize
        return np.frombuffer(self.blocks.read(name, size, start, stop, self._fetch), self.dtype)

    def _fetch(self, start: int, stop: int) -> bytes:
        what = f"reading {self.folder}/{self.name} at offset {start:,}"
        content = with_patience(what, lambda: self.folder.read_range(self.name, start, stop))
        if len(content) != stop - start:
            raise UserError(
                f"{what}: the file ends after {len(content):,} bytes; copy or prepare the data "
                "again"
            )
        return content


def validation_split(
    dataset: str, training: Sequence[str], catalog: AnyCatalog
) -> tuple[list[str], str] | None:
    """Return the datasets to validate with, and their split: `dataset`, by default the datasets of
    `training` that have a validation split; None if all lack one. A dataset without a validation
    split is read as a whole."""

    def splits(name: str) -> Sequence[str]:
        found = find_prepared(name, catalog)
        return tuple(found.splits) if found else catalog.splits(name)

    if not dataset:
        chosen = [name for name in training if VALIDATION in splits(name)]
        return (chosen, VALIDATION) if chosen else None
    available = splits(dataset)
    return [dataset], VALIDATION if VALIDATION in available else available[0]


def dataset_identity(
    datasets: Sequence[str], digest: Callable[[str], str], catalog: AnyCatalog
) -> dict[str, str]:
    """Return the identity of datasets for the run's identity: their content, or their names if the
    content of one is unknown. `digest` returns the digest of data that is not prepared."""
    prepared = [find_prepared(dataset, catalog) for dataset in datasets]
    digests = [
        of.digest if of else digest(name) for name, of in zip(datasets, prepared, strict=True)
    ]
    joined = digests[0] if len(digests) == 1 else digest_of(digests)
    return identify_content(", ".join(map(location, datasets)), joined if all(digests) else "")

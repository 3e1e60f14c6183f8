"""The marker `complete.json`, which makes a folder a checkpoint, and `manifest.json`, which reveals
damage.

The marker is written last and describes the checkpoint. The manifest holds {"algorithm": "sha256",
"files": {relative name: {"bytes": n, "digest": hex}}}. The marker contains the digests of the
manifest and of itself.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypedDict

from torchtitan.components.checkpoint.filesystem import Folder, read_document
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.config.configurable import from_plain
from torchtitan.tools.errors import UserError

Kind = Literal["full", "model_only", "huggingface"]
"""Contents of a checkpoint: everything needed to resume, only the models' weights, or a model in
Hugging Face files."""

MARKER = "complete.json"
MANIFEST = "manifest.json"
_ALGORITHM = "sha256"
_FORMAT_VERSION = 2
VALIDATION_LOSS = "validation_loss"

_OPTIONAL = (
    "base_model",
    "base_digest",
    "identity",
    "length",
    "best_metric",
    "best_value",
    "best_goal",
)
"""Fields omitted if empty."""

KIND_DESCRIPTIONS: dict[Kind, str] = {
    "full": "everything",
    "model_only": "the model only",
    "huggingface": "a Hugging Face model only",
}


def _torch_version() -> str:
    import torch  # takes seconds, which reading markers need not wait for

    return torch.__version__


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marker:
    """Content of `complete.json`."""

    step: int

    kind: Kind

    world_size: int
    """Number of processes that saved the checkpoint."""

    validation_loss: float | None = None
    """Validation loss at `step`, if measured."""

    best_metric: str = ""
    """Name of the number that `keep_best` compares, unless it is the validation loss."""

    best_value: float | None = None
    """Value of `best_metric` at `step`."""

    best_goal: str = ""
    """Direction of better numbers (min or max)."""

    base_model: str = ""
    """Origin of the omitted frozen weights; empty if the checkpoint has all weights."""

    base_digest: str = ""
    """Digest of the omitted weights (`BaseWeights.digest`)."""

    identity: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Properties of the run (`RunIdentity`); empty if the run has no identity."""

    length: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Configured `steps` or `epochs` of the run."""

    manifest: str = ""
    """Digest of manifest.json, set by `commit`."""

    torch_version: str = dataclasses.field(default_factory=_torch_version)

    format_version: int = _FORMAT_VERSION
    """Version of the folder's structure and its entries."""

    @property
    def criterion(self) -> "Criterion":
        """The metric that `keep_best` compared when the checkpoint was saved."""
        return Criterion(self.best_metric, self.best_goal) if self.best_metric else Criterion()


@dataclasses.dataclass(frozen=True)
class Criterion:
    """The metric that `keep_best` compares, from validation or evaluation, and whether lower (min)
    or higher (max) is better."""

    metric: str = VALIDATION_LOSS

    goal: str = "min"

    def loss(self, value: float | None) -> float | None:
        """Return the number to minimize: a value of the metric, negated if higher is better."""
        return -value if value is not None and self.goal == "max" else value

    def loss_of(self, marker: Marker) -> float | None:
        """Return the number to minimize of a checkpoint; None if it was not measured."""
        if self.metric == VALIDATION_LOSS:
            return self.loss(marker.validation_loss)
        return self.loss(marker.best_value) if marker.best_metric == self.metric else None


class MarkerError(Exception):
    """Raised if a marker cannot be used; the message names the file and the reason."""


class UnreadMarkerError(MarkerError):
    """Raised if a marker, possibly intact, could not be read."""


def read_marker(folder: Folder) -> Marker | None:
    """Return the marker in `folder`, None if it has none. Raise `MarkerError` if the marker cannot
    be used."""
    file = f"{folder}/{MARKER}"
    try:
        if not folder.has_file(MARKER):
            return None
        text = read_document(folder, MARKER)
    except OSError as error:
        raise UnreadMarkerError(f"{file} could not be read ({error})") from error
    except UserError as error:
        raise MarkerError(f"{file} is damaged ({error})") from error
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MarkerError(f"{file} is damaged ({error})") from error
    version = (
        content.get("format_version", _FORMAT_VERSION)
        if isinstance(content, dict)
        else _FORMAT_VERSION
    )
    if version != _FORMAT_VERSION:
        raise MarkerError(
            f"{folder} has layout version {version}, but this version of torchtitan reads layout "
            f"version {_FORMAT_VERSION}; load it with the version of torchtitan that wrote it"
        )
    try:
        content.pop("digest")
        marker: Marker = from_plain(Marker, content)
        if (
            isinstance(marker.identity, dict)
            and isinstance(marker.length, dict)
            and marker_content(marker) == text
        ):
            return marker
    except (UserError, AttributeError, TypeError, KeyError):
        pass
    raise MarkerError(f"{file} is damaged (its content is not a valid marker)")


def marker_content(marker: Marker) -> bytes:
    """Return the marker's file content: its fields and a digest, since the manifest does not cover
    the marker."""
    fields = {
        name: value
        for name, value in dataclasses.asdict(marker).items()
        if value or value == 0 or name not in _OPTIONAL
    }
    digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    return json.dumps({**fields, "digest": digest}).encode()


@dataclasses.dataclass(frozen=True)
class Faults:
    """Faults in the files of a checkpoint, one line each. Falsy without faults."""

    damage: Sequence[str] = ()
    """Missing or changed files."""

    unread: Sequence[str] = ()
    """Files that could not be read, but may be intact."""

    def __bool__(self) -> bool:
        return bool(self.damage or self.unread)

    @property
    def lines(self) -> list[str]:
        return [*self.damage, *self.unread]

    def describe(self, shown: int = 5) -> str:
        """Summarize the damage, or else the unreadable files, in one sentence."""
        lines = self.damage or self.unread
        more = f"; and {len(lines) - shown} more" if len(lines) > shown else ""
        return (
            f"{'is damaged' if self.damage else 'could not be read'}: "
            f"{'; '.join(lines[:shown])}{more}"
        )


def write_manifest(folder: Folder, ranks: Ranks) -> str:
    """Sync all files in `folder` to disk, write their manifest, and return its digest. Each rank
    processes a share of the files. Raise `OSError` on every rank if a file cannot be read or
    written."""
    sizes = _list_on_all_ranks(folder, ranks)
    share = split_by_size(sizes, ranks.size)[ranks.rank]

    def digest_share() -> dict[str, str]:
        for name in share:
            folder.sync(name)
        return {name: _digest(folder, name) for name in share}

    digests = {
        name: digest
        for share in ranks.all_ranks_or_raise(digest_share)
        for name, digest in share.items()
    }
    files = {name: {"bytes": n_bytes, "digest": digests[name]} for name, n_bytes in sizes.items()}
    content = json.dumps({"algorithm": _ALGORITHM, "files": files}, indent=1).encode()
    ranks.broadcast_from_rank0(lambda: folder.write(MANIFEST, content))
    return hashlib.sha256(content).hexdigest()


def find_faults(
    folder: Folder, manifest_digest: str, ranks: Ranks, *, only: Collection[str] | None = None
) -> Faults:
    """Compare the files in `folder` with its manifest and ignore unlisted files. Each rank checks a
    share of the files. `manifest_digest` comes from the marker; `only` names the files to check."""
    try:
        content = ranks.broadcast_from_rank0(lambda: read_document(folder, MANIFEST))
        sizes = ranks.broadcast_from_rank0(folder.files)
    except FileNotFoundError:
        return Faults(damage=[f"{MANIFEST} is missing"])
    except OSError as error:
        return Faults(unread=[_describe_unreadable(MANIFEST, error)])
    except UserError as error:
        return Faults(damage=[f"{MANIFEST} is damaged ({error})"])
    if hashlib.sha256(content).hexdigest() != manifest_digest:
        return Faults(damage=[f"{MANIFEST} is damaged (its digest differs)"])
    files = _parse_manifest(content)
    if files is None:
        return Faults(damage=[f"{MANIFEST} is damaged (it lists no files)"])
    expected = {name: files[name] for name in files if only is None or name in only}
    damage = {name: f"{name} is missing" for name in expected if name not in sizes}
    for name in expected.keys() & sizes.keys():
        if sizes[name] != expected[name]["bytes"]:
            damage[name] = f"{name} has {sizes[name]} bytes instead of {expected[name]['bytes']}"
    unread: dict[str, str] = {}
    share = split_by_size(
        {name: sizes[name] for name in expected if name not in damage}, ranks.size
    )[ranks.rank]

    def check_share() -> tuple[dict[str, str], dict[str, str]]:
        differ, failed = {}, {}
        for name in share:
            try:
                if _digest(folder, name) != expected[name]["digest"]:
                    differ[name] = f"{name} is damaged (its digest differs)"
            except OSError as error:
                failed[name] = _describe_unreadable(name, error)
        return differ, failed

    for differ, failed in ranks.all_ranks_or_raise(check_share):
        damage |= differ
        unread |= failed
    return Faults(
        [damage[name] for name in sorted(damage)], [unread[name] for name in sorted(unread)]
    )


class _File(TypedDict):
    bytes: int
    digest: str


def _parse_manifest(content: bytes) -> dict[str, _File] | None:
    """Return the files listed in a manifest; None if it is malformed, which is possible with a
    forged digest."""
    try:
        files = json.loads(content)["files"]
        return {
            name: _File(bytes=file["bytes"], digest=file["digest"]) for name, file in files.items()
        }
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def split_by_size(sizes: Mapping[str, int], n_shares: int) -> list[list[str]]:
    """Split the names into shares of about equal bytes: the largest remaining file goes to the
    smallest share."""
    shares: list[list[str]] = [[] for _ in range(n_shares)]
    totals = [0] * n_shares
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = totals.index(min(totals))
        shares[smallest].append(name)
        totals[smallest] += sizes[name]
    return shares


def _list_on_all_ranks(folder: Folder, ranks: Ranks) -> dict[str, int]:
    """Return the sizes of the files listed on any rank: in some stores, files of other ranks appear
    with a delay."""
    sizes = {
        name: n_bytes
        for listing in ranks.all_ranks_or_raise(folder.files)
        for name, n_bytes in listing.items()
    }

    def check_shared() -> None:
        for name in sizes:
            if not folder.has_file(name):
                raise FileNotFoundError(
                    f"rank 0 cannot see {name}; put {folder.parent} on a shared file system"
                )

    ranks.broadcast_from_rank0(check_shared)
    return dict(sorted(sizes.items()))


def _digest(folder: Folder, name: str) -> str:
    with folder.open(name) as file:
        return hashlib.file_digest(file, _ALGORITHM).hexdigest()


def _describe_unreadable(name: str, error: OSError) -> str:
    return f"{name} cannot be read ({error})"

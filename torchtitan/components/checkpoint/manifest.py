"""The manifest of a checkpoint: size and digest of each of its files, to tell damage from what was written.

`manifest.json` is {"algorithm": "sha256", "files": {relative name: {"bytes": n, "digest": hex}}}. The marker of the
checkpoint carries the manifest's own digest.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.store import Folder

MANIFEST = "manifest.json"
_ALGORITHM = "sha256"


@dataclasses.dataclass(frozen=True)
class Faults:
    """What is wrong with the files of a checkpoint, a line for each; false where nothing is."""

    damage: Sequence[str] = ()
    """What is missing or not as it was written."""

    unread: Sequence[str] = ()
    """What could not be read, now: it may be whole."""

    def __bool__(self) -> bool:
        return bool(self.damage or self.unread)

    @property
    def lines(self) -> list[str]:
        """All of it."""
        return [*self.damage, *self.unread]

    def in_words(self, shown: int = 5) -> str:
        """In one sentence: damage, and the files that could not be read where there is none."""
        lines = self.damage or self.unread
        more = f"; and {len(lines) - shown} more" if len(lines) > shown else ""
        return f"{'is damaged' if self.damage else 'could not be read'}: {'; '.join(lines[:shown])}{more}"


def write_manifest(folder: Folder, ranks: Ranks) -> str:
    """Write the manifest of all files in `folder`, every rank digesting its share; return the manifest's digest.

    The files outlast a power failure when this returns.

    Raises:
        OSError: on every rank, where a file cannot be read or the manifest not be written.
    """
    sizes = _files_of_all(folder, ranks)
    shares = split_by_size(sizes, ranks.size)

    def digest_share() -> dict[str, str]:
        for name in shares[ranks.rank]:
            folder.sync(name)
        return {name: _digest(folder, name) for name in shares[ranks.rank]}

    digests = {name: digest for share in ranks.together(digest_share) for name, digest in share.items()}
    files = {name: {"bytes": n_bytes, "digest": digests[name]} for name, n_bytes in sizes.items()}
    content = json.dumps({"algorithm": _ALGORITHM, "files": files}, indent=1).encode()
    ranks.first_decides(lambda: folder.write(MANIFEST, content))
    return hashlib.sha256(content).hexdigest()


def find_faults(folder: Folder, manifest_digest: str, ranks: Ranks, *, only: Collection[str] | None = None) -> Faults:
    """How the files in `folder` differ from its manifest, every rank digesting its share.

    Files that the manifest does not know are no fault.

    Args:
        folder: that of a checkpoint.
        manifest_digest: what the marker says of the manifest.
        ranks: those who share the work.
        only: names of the files to look at; None: all.
    """
    try:
        content = ranks.first_decides(lambda: folder.read(MANIFEST))
        sizes = ranks.first_decides(folder.files)
    except FileNotFoundError:
        return Faults(damage=[f"{MANIFEST} is missing"])
    except OSError as error:
        return Faults(unread=[_unreadable(MANIFEST, error)])
    if hashlib.sha256(content).hexdigest() != manifest_digest:
        return Faults(damage=[f"{MANIFEST} is damaged (its digest differs)"])
    files = _listed(content)
    if files is None:
        return Faults(damage=[f"{MANIFEST} is damaged (it lists no files)"])
    expected = {name: files[name] for name in files if only is None or name in only}
    damage = {name: fault for name in expected if (fault := _size_fault(name, expected[name]["bytes"], sizes))}
    unread: dict[str, str] = {}
    shares = split_by_size({name: sizes[name] for name in expected if name not in damage}, ranks.size)

    def check_share() -> tuple[dict[str, str], dict[str, str]]:
        differ, failed = {}, {}
        for name in shares[ranks.rank]:
            try:
                if _digest(folder, name) != expected[name]["digest"]:
                    differ[name] = f"{name} is damaged (its digest differs)"
            except OSError as error:
                failed[name] = _unreadable(name, error)
        return differ, failed

    for differ, failed in ranks.together(check_share):
        damage |= differ
        unread |= failed
    return Faults([damage[name] for name in sorted(damage)], [unread[name] for name in sorted(unread)])


def _listed(content: bytes) -> dict[str, Any] | None:
    """Return the files that a manifest lists; None if it is none, which its digest does not tell where both are
    forged."""
    try:
        files = json.loads(content)["files"]
        return {name: {"bytes": file["bytes"], "digest": file["digest"]} for name, file in files.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def split_by_size(sizes: Mapping[str, int], n_shares: int) -> list[list[str]]:
    """The names in `n_shares` shares of about the same number of bytes: each, the largest first, to the smallest."""
    shares: list[list[str]] = [[] for _ in range(n_shares)]
    totals = [0] * n_shares
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = totals.index(min(totals))
        shares[smallest].append(name)
        totals[smallest] += sizes[name]
    return shares


def _files_of_all(folder: Folder, ranks: Ranks) -> dict[str, int]:
    """Bytes of every file that any rank sees: the others' may show late in a listing, and must not be left out."""
    sizes = {name: n_bytes for listing in ranks.together(folder.files) for name, n_bytes in listing.items()}

    def check_shared() -> None:
        for name in sizes:
            if not folder.has_file(name):
                raise FileNotFoundError(f"rank 0 does not see {name}: all processes must see one {folder.parent}")

    ranks.first_decides(check_shared)
    return dict(sorted(sizes.items()))


def _digest(folder: Folder, name: str) -> str:
    with folder.open(name) as file:
        return hashlib.file_digest(file, _ALGORITHM).hexdigest()


def _size_fault(name: str, n_bytes: int, sizes: Mapping[str, int]) -> str:
    if name not in sizes:
        return f"{name} is missing"
    return "" if sizes[name] == n_bytes else f"{name} has {sizes[name]} bytes, and not {n_bytes}"


def _unreadable(name: str, error: OSError) -> str:
    return f"{name} cannot be read ({error})"

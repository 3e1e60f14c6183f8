"""The manifest of a checkpoint: size and digest of each of its files, to tell damage from what was written.

`manifest.json` is {"algorithm": "sha256", "files": {relative name: {"bytes": n, "digest": hex}}}. The marker of the
checkpoint carries the manifest's own digest.
"""

import hashlib
import json
from collections.abc import Mapping

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.store import Folder

MANIFEST = "manifest.json"
_ALGORITHM = "sha256"


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


def find_faults(folder: Folder, manifest_digest: str, ranks: Ranks) -> list[str]:
    """How the files in `folder` differ from its manifest, one line for each, every rank digesting its share.

    Files that the manifest does not know are no fault. Empty: all is as it was written.
    """
    try:
        content = ranks.first_decides(lambda: folder.read(MANIFEST))
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except OSError as error:
        return [_unreadable(MANIFEST, error)]
    if hashlib.sha256(content).hexdigest() != manifest_digest:
        return [f"{MANIFEST} is damaged (its digest differs)"]
    expected = json.loads(content)["files"]
    sizes = ranks.first_decides(folder.files)
    faults = {name: fault for name in expected if (fault := _size_fault(name, expected[name]["bytes"], sizes))}
    shares = split_by_size({name: sizes[name] for name in expected if name not in faults}, ranks.size)

    def check_share() -> dict[str, str]:
        checked = {name: _digest_fault(folder, name, expected[name]["digest"]) for name in shares[ranks.rank]}
        return {name: fault for name, fault in checked.items() if fault}

    for found in ranks.together(check_share):
        faults |= found
    return [faults[name] for name in sorted(faults)]


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


def _digest_fault(folder: Folder, name: str, digest: str) -> str:
    try:
        return "" if _digest(folder, name) == digest else f"{name} is damaged (its digest differs)"
    except OSError as error:
        return _unreadable(name, error)


def _unreadable(name: str, error: OSError) -> str:
    return f"{name} cannot be read ({error})"

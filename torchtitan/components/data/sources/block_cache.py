"""Blocks of files in a store, cached in one file on the local disk."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchtitan.tools.digests import bytes_digest
from torchtitan.tools.logging import logger

BLOCK_BYTES = 1 << 18
_DIGEST_BYTES = 32
_SLOT_BYTES = _DIGEST_BYTES + BLOCK_BYTES
"""A slot holds the digest of a block's name and content, in hexadecimal, and the content."""


@dataclass
class BlockCache:
    """A file of slots. A block's name determines its slot, and a new block replaces the old one
    there, so the size is bounded without a list of blocks. All processes of a host with the same
    size may use the file at once: a block that another process is overwriting has a wrong digest,
    and is read from the store. Runs with another size use another file, since the same block has
    another slot there. Can be pickled."""

    root: Path
    """Existing folder of the file."""
    n_bytes: int
    """Largest size of the file; 0: no cache."""

    def read(
        self, name: str, size: int, start: int, stop: int, fetch: Callable[[int, int], bytes]
    ) -> bytes:
        """Return the bytes from `start` up to `stop` of the file `name` of `size` bytes, whose
        content never changes. If the cache cannot be read or written, for example because the disk
        is full, warn once, and read without it.

        Args:
            fetch: reads a range of the file from the store. Raises no `OSError`.
        """
        if (n_bytes := self.n_bytes) >= _SLOT_BYTES:
            try:
                n_slots = n_bytes // _SLOT_BYTES
                path = self.root / f"remote_blocks_{n_slots}"
                with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", 0) as file:
                    first = start - start % BLOCK_BYTES
                    bounds = [
                        (begin, min(begin + BLOCK_BYTES, size))
                        for begin in range(first, stop, BLOCK_BYTES)
                    ]
                    blocks = [
                        _block(file.fileno(), n_slots, name, begin, end, fetch)
                        for begin, end in bounds
                    ]
                    return b"".join(blocks)[start - first : stop - first]
            except OSError as error:
                if self.n_bytes:  # no other thread has warned yet
                    logger.warning(
                        f"remote data is read without the cache in {self.root}: {error.strerror}"
                    )
                self.n_bytes = 0
        return fetch(start, stop)


def _block(
    file: int, n_slots: int, name: str, start: int, stop: int, fetch: Callable[[int, int], bytes]
) -> bytes:
    key = f"{name} {start}".encode()
    place = int(bytes_digest(key), 16) % n_slots * _SLOT_BYTES
    slot = os.pread(file, _DIGEST_BYTES + stop - start, place)
    content = slot[_DIGEST_BYTES:]
    if bytes_digest(key + content).encode() != slot[:_DIGEST_BYTES]:
        content = fetch(start, stop)
        os.pwrite(file, bytes_digest(key + content).encode() + content, place)
    return content

"""Blocks of files in a store, cached in one file on the local disk."""

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from torchtitan.components.data.disk_cache import bytes_digest
from torchtitan.tools import durable
from torchtitan.tools.logging import logger

BLOCK_BYTES = 1 << 18
_DIGEST_BYTES = 32
_SLOT_BYTES = _DIGEST_BYTES + BLOCK_BYTES
"""A slot holds the digest of a block's name and content, in hexadecimal, and the content."""


class BlockCache:
    """A file of slots. The name of a block determines its slot, in which it replaces any other, so the size is bounded
    without a list of blocks. All processes of a host may use the file at once: a block that another process is
    overwriting has a wrong digest, and is read from the store. Can be pickled.

    Args:
        root: folder of the file.
        n_bytes: largest size of the file; 0: no cache.
    """

    def __init__(self, root: Path, n_bytes: int):
        self.root, self._n_bytes = root, n_bytes
        self._n_slots = n_bytes // _SLOT_BYTES

    def __reduce__(self) -> tuple[type["BlockCache"], tuple[Path, int]]:
        return BlockCache, (self.root, self._n_bytes)

    @cached_property
    def _file(self) -> int:
        durable.make_folder(self.root)
        file = os.open(self.root / "remote_blocks", os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(file).st_size > self._n_bytes:  # of a run with a larger cache
            os.truncate(file, self._n_bytes)
        return file

    def read(self, name: str, size: int, start: int, stop: int, fetch: Callable[[int, int], bytes]) -> bytes:
        """Return the bytes from `start` up to `stop` of the file `name` of `size` bytes, whose content never changes.
        If the cache cannot be read or written, for example because the disk is full, warn once, and read without it.

        Args:
            fetch: reads a range of the file from the store. Raises no `OSError`.
        """
        if n_slots := self._n_slots:
            try:
                first = start - start % BLOCK_BYTES
                bounds = [(begin, min(begin + BLOCK_BYTES, size)) for begin in range(first, stop, BLOCK_BYTES)]
                blocks = [self._block(name, begin, end, n_slots, fetch) for begin, end in bounds]
                return b"".join(blocks)[start - first : stop - first]
            except OSError as error:
                if self._n_slots:  # not yet told by another thread
                    logger.warning(f"remote data is read without the cache in {self.root}: {error.strerror}")
                self._n_slots = 0
        return fetch(start, stop)

    def _block(self, name: str, start: int, stop: int, n_slots: int, fetch: Callable[[int, int], bytes]) -> bytes:
        key = f"{name} {start}".encode()
        place = int(bytes_digest(key), 16) % n_slots * _SLOT_BYTES
        slot = os.pread(self._file, _DIGEST_BYTES + stop - start, place)
        content = slot[_DIGEST_BYTES:]
        if bytes_digest(key + content).encode() != slot[:_DIGEST_BYTES]:
            content = fetch(start, stop)
            os.pwrite(self._file, bytes_digest(key + content).encode() + content, place)
        return content

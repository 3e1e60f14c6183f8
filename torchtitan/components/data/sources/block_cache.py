"""Blocks of files in a store, cached in one file on the local disk."""

import os
import struct
import zlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from torchtitan.components.data.disk_cache import bytes_digest
from torchtitan.tools import durable
from torchtitan.tools.logging import logger

BLOCK_BYTES = 1 << 18
_HEADER = struct.Struct("<16sII")
"""Digest of the block's name, and number of bytes and CRC-32 of its content."""
_SLOT_BYTES = _HEADER.size + BLOCK_BYTES


class BlockCache:
    """A file of slots. The name of a block determines its slot, in which it replaces any other, so the size is bounded
    without a list of blocks. All processes of a host may use the file at once: a block that another process is
    overwriting has a wrong checksum, and is read from the store. Can be pickled.

    Args:
        root: folder of the file.
        n_bytes: largest size of the file; 0: no cache.
    """

    def __init__(self, root: Path, n_bytes: int):
        self.root, self.n_bytes = root, n_bytes
        self._n_slots = n_bytes // _SLOT_BYTES

    def __reduce__(self) -> tuple[type["BlockCache"], tuple[Path, int]]:
        return BlockCache, (self.root, self.n_bytes)

    @cached_property
    def _file(self) -> int:
        durable.make_folder(self.root)
        return os.open(self.root / "remote_blocks", os.O_RDWR | os.O_CREAT, 0o600)

    def read(self, name: str, start: int, stop: int, fetch: Callable[[int, int], bytes]) -> bytes:
        """Return the bytes from `start` up to `stop` of the file `name`, whose content never changes. If the cache
        cannot be read or written, for example because the disk is full, warn once, and go on without it.

        Args:
            fetch: reads a range of the file from the store; shorter at the end of the file. Raises no `OSError`.
        """
        first = start // BLOCK_BYTES
        if n_slots := self._n_slots:
            try:
                numbers = range(first, -(-stop // BLOCK_BYTES))
                content = b"".join(self._block(name, number, n_slots, fetch) for number in numbers)
                return content[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]
            except OSError as error:
                if self._n_slots:  # not yet told by another thread
                    logger.warning(
                        f"remote data is read without the cache in {self.root} from now on: {error.strerror}"
                    )
                self._n_slots = 0
        return fetch(start, stop)

    def _block(self, name: str, number: int, n_slots: int, fetch: Callable[[int, int], bytes]) -> bytes:
        key = bytes.fromhex(bytes_digest(f"{name} {number}".encode()))
        place = int.from_bytes(key, "little") % n_slots * _SLOT_BYTES
        slot = os.pread(self._file, _SLOT_BYTES, place)
        if len(slot) > _HEADER.size:
            found, size, checksum = _HEADER.unpack_from(slot)
            content = slot[_HEADER.size : _HEADER.size + size]
            if found == key and len(content) == size and zlib.crc32(content) == checksum:
                return content
        content = fetch(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)
        os.pwrite(self._file, _HEADER.pack(key, len(content), zlib.crc32(content)) + content, place)
        return content

"""Simulation of PyTorch's CUDA allocator: the memory that it would reserve for a sequence of allocations."""

import bisect
from collections import defaultdict
from collections.abc import Hashable

_MIB = 2**20
_ROUNDING = 512
_SMALL = _MIB
"""Allocations up to this size share segments of `_SMALL_SEGMENT`, separate from large allocations."""
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB
"""Allocations of at least this size that fit no free block get their own segment, a multiple of `_SEGMENT_UNIT`."""
_SEGMENT_UNIT = 2 * _MIB


class CachingAllocator:
    """PyTorch's CUDA allocator with default settings, for a device with free memory.

    Freed memory stays reserved for its stream. An allocation takes the smallest sufficient free block; the rest becomes
    a block of its own if it is at least 512 bytes (small allocations) or more than 1 MiB (large ones). Free neighbors
    merge. If no free block is large enough, another segment is reserved. See "Memory management" in
    https://docs.pytorch.org/docs/stable/notes/cuda.html and c10/cuda/CUDACachingAllocator.cpp.
    """

    def __init__(self) -> None:
        self.reserved = 0
        """Bytes, never decreasing."""
        self._pools: dict[Hashable, _FreeBlocks] = defaultdict(_FreeBlocks)
        self._used: dict[Hashable, tuple[_FreeBlocks, int, int]] = {}  # pool, address, size
        self._end = 0

    def allocate(self, key: Hashable, n_bytes: int, stream: Hashable = None) -> None:
        size = -(-max(n_bytes, 1) // _ROUNDING) * _ROUNDING
        is_small = size <= _SMALL
        pool = self._pools[stream, is_small]
        address, block = pool.take(size) or self._reserve(size)
        rest = block - size
        if rest >= _ROUNDING if is_small else rest > _SMALL:
            pool.add(address + size, rest)
            block = size
        self._used[key] = (pool, address, block)

    def free(self, key: Hashable) -> None:
        pool, address, size = self._used.pop(key)
        pool.add(address, size)

    def _reserve(self, size: int) -> tuple[int, int]:
        segment = _SMALL_SEGMENT if size <= _SMALL else _LARGE_SEGMENT
        if size >= _OWN_SEGMENT:
            segment = -(-size // _SEGMENT_UNIT) * _SEGMENT_UNIT
        # A gap keeps segments from being neighbors.
        address, self._end = self._end, self._end + segment + 1
        self.reserved += segment
        return address, segment


class _FreeBlocks:
    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (size, address), sorted
        self._other_end: dict[int, int] = {}  # start → end and end → start of each block; neighbors are merged

    def take(self, size: int) -> tuple[int, int] | None:
        index = bisect.bisect_left(self._by_size, (size, 0))
        if index == len(self._by_size):
            return None
        block, address = self._by_size[index]
        self._remove(address, address + block)
        return address, block

    def add(self, address: int, size: int) -> None:
        start, end = address, address + size
        if (before := self._other_end.get(start)) is not None:
            self._remove(before, start)
            start = before
        if (after := self._other_end.get(end)) is not None:
            self._remove(end, after)
            end = after
        bisect.insort(self._by_size, (end - start, start))
        self._other_end |= {start: end, end: start}

    def _remove(self, start: int, end: int) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (end - start, start))]
        del self._other_end[start], self._other_end[end]

"""The global order of pre-training data."""

import bisect
import hashlib
import itertools
import math
import struct
import sys
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from torchtitan.components.data.plan.mixture import Mixture
from torchtitan.components.data.plan.sampler import Array
from torchtitan.tools.errors import UserError

MOST_TURNS = 10_000
"""Longest cycle of sets with weights; enough for weights of four decimals that add up to 1."""

_MASK = (1 << 64) - 1


class BlockOrder:
    """Global order of the blocks of several sets, computed for any place in it.

    Without weights, each epoch is one permutation of all blocks. With weights, the sets take turns
    in a cycle, which holds them in exactly the ratio of their weights, and in which each stays
    within one block of its share (see `Mixture`); each set is read in its own epochs.

    Args:
        sizes: blocks of each set, at least 1.
        weights: share of each set, as numbers with few digits; empty: no weights.
        shuffle: permute the blocks in each epoch; False: keep the order of the data.
        seed: random seed of the permutations.
        first: place at which the order begins, because weights have changed there.
        read: with weights, blocks of each set before `first`; empty: none.
        last: set and block at the place before `first`, which may be read further.

    Raises:
        UserError: weights are invalid, or see `check_cycle`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] = (),
        *,
        shuffle: bool,
        seed: int,
        first: int = 0,
        read: Sequence[int] = (),
        last: Sequence[int] = (),
    ):
        self._sizes = sizes
        self._weights = weights
        self._shuffle = shuffle
        self._seed = seed
        self._ends = list(itertools.accumulate(sizes))
        self._groups = sizes if weights else self._ends[-1:]
        """Blocks of each set; without weights, of all sets as one."""
        self._turns = turns_of(weights or [1])
        """Group of each block in the cycle, (n,)."""
        self._first = first
        self._last = tuple(last)
        self._read: Array = np.array(read or [0] * len(self._groups), np.int64)

    def block(self, place: int) -> tuple[int, int]:
        """Return the set, and the block of it, at a place in the global order."""
        if place < self._first:
            assert place == self._first - 1, "earlier places are in another order"
            number, block = self._last
            return number, block
        number = int(self._turns[(place - self._first) % len(self._turns)])
        epoch, block = divmod(int(self._counts(place)[number]), self._groups[number])
        if self._shuffle:
            block = permute(block, self._groups[number], self._seed, epoch)
        if not self._weights:
            number = bisect.bisect_right(self._ends, block)
            block -= self._ends[number] - self._sizes[number]
        return number, block

    def blocks_of_sets(self, n_blocks: int) -> list[float]:
        """Return how many of the first `n_blocks` are of each set; without weights, their mean over
        all seeds."""
        if not self._weights:
            return [n_blocks * size / self._ends[-1] for size in self._sizes]
        return list(map(float, self._counts(n_blocks)))

    def read_before(self, place: int) -> list[int]:
        """Return the blocks of each set before a place; with weights only."""
        counts: list[int] = self._counts(place).tolist()
        return counts

    def _counts(self, n_blocks: int) -> Array:
        """Return how many of the first `n_blocks` are of each group, (n_groups,)."""
        cycles, rest = divmod(n_blocks - self._first, len(self._turns))
        whole, begun = (
            np.bincount(turns, minlength=len(self._groups))
            for turns in (self._turns, self._turns[:rest])
        )
        return self._read + cycles * whole + begun

    def blocks_in(self, epochs: int) -> int:
        """Return the number of blocks until, with weights, the first set has been read `epochs`
        times."""
        wanted = epochs * np.array(self._groups, object)  # Python's integers, which do not overflow
        return bisect.bisect_left(
            range(sys.maxsize), True, key=lambda n: bool((self._counts(n) >= wanted).any())
        )


def check_cycle(weights: Sequence[float]) -> int:
    """Return the number of blocks in the shortest cycle that holds each set in the ratio of its
    weight. Raise `UserError` if there are more than `MOST_TURNS`."""
    # 0.1 is a tenth, unlike its binary value
    ratios = [Fraction(str(weight)) for weight in weights]
    n_turns = math.lcm(*((ratio / sum(ratios)).denominator for ratio in ratios))
    if n_turns > MOST_TURNS:
        raise UserError(
            f"--dataloader.weights: the shortest cycle with exactly these shares has {n_turns:,} "
            f"windows, more than {MOST_TURNS:,}; use fewer digits"
        )
    return n_turns


def turns_of(weights: Sequence[float]) -> Array:
    """Return the shortest cycle that holds each set in the ratio of its weight, (n,)."""
    mixture = Mixture(weights, capacity=1)
    turns: list[int] = []
    for _ in range(check_cycle(weights)):
        turns.append(mixture.choose(dict.fromkeys(mixture.released(), 1)))
        mixture.add_window(turns[-1], 1)
    return np.array(turns)


def permute(index: int, size: int, *key: int) -> int:
    """Return the image of `index` under a pseudo-random permutation of `range(size)` chosen by
    `key`.

    Needs no memory: a Feistel network permutes a range of at least `size` with an even number of
    bits, and is repeated until the result is in range ("cycle walking"; Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002). The domain has at most 4 * `size` elements, so the mean
    number of passes is below 4.
    """
    assert 0 <= index < size
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    half_mask = (1 << half_bits) - 1
    round_keys = struct.unpack(
        "<6Q", hashlib.blake2b(repr(key).encode(), digest_size=6 * 8).digest()
    )
    while True:
        left, right = index >> half_bits, index & half_mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & half_mask)
        index = left << half_bits | right
        if index < size:
            return index


def _mix(value: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014): each input bit affects all output
    bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)

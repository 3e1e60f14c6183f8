"""Base classes of procedurally generated data: splits and seeded random draws."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Generic, Literal, TypeVar

from torchtitan.tools.errors import UserError

T = TypeVar("T")

_FOLDER = Path(__file__).parent


def read_tables(name: str) -> dict[str, Any]:
    """Return the tables in `name`, a JSON file next to this module."""
    return json.loads((_FOLDER / name).read_bytes())


def version_of(*names: str) -> str:
    """Return a digest of this module and of files next to it; equal versions generate equal
    items."""
    contents = [(_FOLDER / name).read_bytes() for name in (*names, Path(__file__).name)]
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


class Draw:
    """Seeded draws from tables. They use only `Random.random`, whose numbers are the same in every
    Python version."""

    def __init__(self, seed: int):
        self.uniform = Random(seed).random

    def __call__(self, values: Sequence[T]) -> T:
        return values[int(self.uniform() * len(values))]


class Generated(ABC, Generic[T]):
    """Items of one split, by index.

    Item `i` depends only on the split and `i`, on every machine and in every Python version.

    Args:
        split: `train`, or `validation`.
        n: number of items. None: the default of the split (`n_default`).

    Raises:
        UserError: if `n` is below 1.
    """

    n_default: ClassVar[Mapping[str, int]]
    """Default number of items of each split."""

    def __init__(self, split: Literal["train", "validation"], n: int | None = None):
        if n is not None and n < 1:
            raise UserError(f"{type(self).__name__}: n must be at least 1, not {n}")
        self.split = split
        self._n = self.n_default[split] if n is None else n

    @abstractmethod
    def write(self, draw: Draw, *, held_out: bool) -> T:
        """Return a new item; `held_out` is True for the validation split."""

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[T]:
        return (self[i] for i in range(self._n))

    def __getitem__(self, i: int) -> T:
        """Return item `i`; raise `IndexError` outside [0, len)."""
        if not 0 <= i < self._n:
            raise IndexError(f"{i} of {self._n} {type(self).__name__}")
        held_out = self.split == "validation"
        return self.write(Draw(2 * i + held_out), held_out=held_out)


def draw_pair(draw: Draw, n: int, *, held_out: bool) -> tuple[int, int]:
    """Return two different numbers below `n` that the other split never pairs; about 1 in 20 pairs
    is held out."""
    while True:
        first, second = draw(range(n)), draw(range(n))
        if first != second and ((first + second) % 20 == 0) == held_out:
            return first, second


def capitalized(text: str) -> str:
    """Return `text` with its first letter capitalized."""
    return text[0].upper() + text[1:]

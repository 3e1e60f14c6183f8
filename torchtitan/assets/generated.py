"""Data that a program makes up: the splits, and the random draws behind each item."""

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
    """Return the tables in `name`, a JSON file beside this module."""
    return json.loads((_FOLDER / name).read_bytes())


def version_of(*names: str) -> str:
    """Digest of files beside this module and of this module itself: equal versions generate equal items."""
    contents = [(_FOLDER / name).read_bytes() for name in (*names, Path(__file__).name)]
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


class Draw:
    """Draws from tables; of `random.Random`, only `random()` promises the same numbers in every version of Python."""

    def __init__(self, seed: int):
        self.uniform = Random(seed).random

    def __call__(self, values: Sequence[T]) -> T:
        return values[int(self.uniform() * len(values))]


class Generated(ABC, Generic[T]):
    """The items of one split, by index.

    Item `i` is a function of the split and `i` alone, on every machine and in every version of Python.

    Args:
        split: `train`, or `validation`.
        n: number of items; None: as many as usual.

    Raises:
        UserError: when `n` is below 1.
    """

    n_default: ClassVar[Mapping[str, int]]
    """Usual number of items of each split."""

    def __init__(self, split: Literal["train", "validation"], n: int | None = None):
        if n is not None and n < 1:
            raise UserError(f"there must be at least 1 of the {type(self).__name__}, not {n}")
        self.split = split
        self._n = self.n_default[split] if n is None else n

    @abstractmethod
    def write(self, draw: Draw, *, held_out: bool) -> T:
        """An item by fresh draws; `held_out`: of the split `validation`."""

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[T]:
        return (self[i] for i in range(self._n))

    def __getitem__(self, i: int) -> T:
        """Item `i`; raises `IndexError` outside [0, len)."""
        if not 0 <= i < self._n:
            raise IndexError(f"{i} of {self._n} {type(self).__name__}")
        held_out = self.split == "validation"
        return self.write(Draw(2 * i + held_out), held_out=held_out)


def draw_pair(draw: Draw, n: int, *, held_out: bool) -> tuple[int, int]:
    """Two different numbers below `n` that the other split never has together: about one pair in 20 is held out."""
    while True:
        first, second = draw(range(n)), draw(range(n))
        if first != second and ((first + second) % 20 == 0) == held_out:
            return first, second


def capitalized(text: str) -> str:
    """Return a text with a capital first letter; the others stay."""
    return text[0].upper() + text[1:]

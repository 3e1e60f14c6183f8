"""`Progress`: the length, marks and remaining budget of a rendering."""

import math
import threading
import time
from collections import Counter
from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field

import jinja2.runtime

PROGRESS = "its progress"
"""Variable with the `Progress` of a rendering. Templates cannot access it because of the space in
its name."""

BUDGET = 2**28
"""Budget of one rendering; a conversation of a thousand turns uses a few percent."""

SECONDS = 10.0
"""Limit on the CPU time of each rendering, for operations that take longer than their price
suggests."""

ITEM = 64
"""Price of a list item; a character costs 1."""

_LONG = 100
"""Length of a list from which on each different item is measured once only."""


class WorkLimitError(Exception):
    """A template exceeds the limits of one rendering."""


class _Clock(threading.local):
    """The thread's CPU time, read at most once per second, since reading it may take longer than a
    rendering."""

    def __init__(self) -> None:
        self._read_at = -math.inf
        self._cpu_time = 0.0

    def cpu_time(self) -> float:
        """Return the CPU time as of the last second."""
        now = time.monotonic()
        if now > self._read_at + 1.0:
            self._read_at, self._cpu_time = now, time.thread_time()
        return self._cpu_time


_clock = _Clock()


@dataclass(slots=True)
class Progress:
    """Length of the text rendered so far, marks, and remaining budget."""

    n_characters: int = 0
    marks: list[tuple[int, str]] = field(default_factory=list)
    """Start and text of each mark."""
    budget: int = field(default_factory=lambda: BUDGET)
    cpu_started: float = field(default_factory=lambda: _clock.cpu_time())
    started: float = field(default_factory=time.monotonic)

    def spend(self, amount: int) -> None:
        """Subtract `amount` from the budget. Raise `WorkLimitError` if the budget is exceeded."""
        self.budget -= amount
        if self.budget < 0:
            raise WorkLimitError

    def check_time(self) -> None:
        """Raise `WorkLimitError` after `SECONDS`. The limit applies to the thread's CPU time, which
        is slower to read than the wall-clock time."""
        if (
            time.monotonic() > self.started + SECONDS
            and time.thread_time() > self.cpu_started + SECONDS
        ):
            raise WorkLimitError

    def size(self, value: object) -> int:
        """Return the length of a value as text. Raise `WorkLimitError` if it exceeds the remaining
        budget."""
        return len(value) if isinstance(value, str) else self._size(value, {})

    def _size(self, value: object, known: dict[int, int]) -> int:
        """`known`: sizes by `id` of the containers in a value, which may be in it any number of
        times."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 8
        if not isinstance(value, (Mapping, list, tuple, KeysView, ValuesView, ItemsView)):
            return ITEM
        if id(value) in known:
            return known[id(value)]
        size = ITEM * len(value)
        if size > self.budget:
            raise WorkLimitError
        if isinstance(value, (list, tuple)) and len(value) > _LONG:
            # A list that doubles itself holds the same few items millions of times.
            items = dict(zip(map(id, value), value, strict=True))
            repeated = Counter(map(id, value)).items()
            size += sum(number * self._size(items[key], known) for key, number in repeated)
            known[id(value)] = size
            return size
        for item in value.items() if isinstance(value, Mapping) else value:
            if isinstance(value, (Mapping, ItemsView)):
                # Pairs are made as they are read: their ids are used again.
                size += 2 * ITEM + sum(self._size(part, known) for part in item)
            else:
                size += self._size(item, known)
            if size > self.budget:
                raise WorkLimitError
        known[id(value)] = size
        return size


def progress_of(context: jinja2.runtime.Context) -> Progress:
    """Return the progress of the rendering that has a context."""
    progress: Progress = context.parent[PROGRESS]
    return progress

"""Runs coroutines that await an engine's texts and nothing else, without an asyncio loop."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torchtitan.components.generation.batch import Batch
from torchtitan.components.generation.row import Generation, Row, TextCoroutine
from torchtitan.tools.errors import UserError

Arrivals = Callable[[int], Sequence[TextCoroutine[Any]] | None]
"""Called between two tokens with the number of free rows, without `max_rows` a very large one;
returns coroutines that start now. None: end, for example because no text is left, so that the
cache's memory is free until more arrive."""

_NOT_A_TEXT = (
    "a coroutine that Engine.serve runs can await only this engine's `generate`, since no asyncio "
    "loop runs it; Engine.run has one"
)
# slots that the cache of `serve` reserves at a time, since most texts end before their limit
_GROWTH = 256


class PlainLoop:
    """Coroutines, and the batch of the texts that they await. `advancing` surrounds their code."""

    def __init__(self, batch: Batch, advancing: Callable[[], AbstractContextManager[None]]):
        self._batch = batch
        self._advancing = advancing
        self._coroutines: dict[int, TextCoroutine[Any]] = {}
        self._n_started = 0
        self._results: dict[int, object] = {}

    def finish(self, texts: Sequence[TextCoroutine[Any]]) -> list[Any]:
        """Return the results of all coroutines."""
        with self._batch.computing():
            self._start(texts)
            while self._batch.step().has_rows:
                pass
        return [self._results[number] for number in range(len(texts))]

    def serve(self, arrivals: Arrivals) -> None:
        """Run the coroutines that arrive until there are no more; then, or after an error, close
        the coroutines that have not ended."""
        self._batch.growth = _GROWTH
        try:
            with self._batch.computing():
                while (texts := arrivals(self._batch.n_free)) is not None:
                    self._start(texts)
                    self._results.clear()
                    self._batch.step()
                    self._batch.check()
        finally:
            close_all(list(self._coroutines.values()))

    def _start(self, texts: Sequence[TextCoroutine[Any]]) -> None:
        first = self._n_started
        self._n_started += len(texts)
        self._coroutines |= enumerate(texts, first)
        for number in range(first, self._n_started):
            self._advance(number, None)

    def _advance(self, number: int, generation: Generation | None) -> None:
        """Continue a coroutine until it awaits its next text."""
        text = self._coroutines[number]
        with self._advancing():
            try:
                row = text.send(generation)
                if not isinstance(row, Row):
                    text.throw(UserError(_NOT_A_TEXT))
                    raise UserError(_NOT_A_TEXT)  # the coroutine has caught the first one
            except StopIteration as end:
                self._results[number] = end.value
                del self._coroutines[number]
            except Exception as error:
                self._batch.fail(error)
                del self._coroutines[number]
            else:
                row.end = partial(self._advance, number)
                self._batch.add(row)


def close_all(texts: Sequence[TextCoroutine[Any]]) -> None:
    """Close all coroutines, even if the cleanup of one fails."""
    with ExitStack() as stack:
        for text in reversed(texts):
            stack.callback(text.close)

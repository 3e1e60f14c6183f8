"""An asyncio loop for coroutines that await an engine's texts."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch

from torchtitan.components.generation.row import Generation, ResultT, Row, TextCoroutine
from torchtitan.tools.errors import UserError, in_words
from torchtitan.tools.logging import logger

_IN_A_LOOP = (
    "Engine.run starts an asyncio loop, and one runs in this thread already; use await "
    "asyncio.to_thread(engine.run, texts)"
)

_SETTLING = 4  # levels of tasks that continue before the next token, such as by asyncio.gather
_POLL_SECONDS = 0.005  # between questions to other processes, while no process has a text


class Session:
    """Coroutines that an asyncio loop runs in this thread, and the texts of an engine that they
    await. Use it in a `with` block; its end cancels the coroutines that have not ended. Between two
    calls of `finish`, nothing runs except in a block of `beside`, and texts may be unfinished: they
    continue with the weights of the later call. Raises `UserError` if a loop already runs in this
    thread, or the engine is already running."""

    def __init__(self, engine: Any):
        self._engine = engine

    def __enter__(self) -> "Session":
        self._run = self._engine.begin_session(self)
        if is_in_loop():
            self._engine.leave_session()
            self._engine.end_session()
            raise UserError(_IN_A_LOOP)
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.leave_session()  # a coroutine that cleans up awaits no text
        try:
            end_loop(self._loop)
        finally:
            self._engine.end_session()

    @property
    def is_here(self) -> bool:
        """True if the code that asks runs in a coroutine of this session."""
        return is_in_loop() and asyncio.get_running_loop() is self._loop

    def start(self, texts: Sequence[TextCoroutine[ResultT]]) -> "list[asyncio.Task[ResultT]]":
        """Return tasks of coroutines, which run in `finish`."""
        tasks = [self._loop.create_task(text) for text in texts]
        for task in tasks:
            task.add_done_callback(self._on_end)
        return tasks

    @torch.no_grad()
    def finish(
        self,
        tasks: "Sequence[asyncio.Task[ResultT]]",
        at_least: Callable[[], int] = lambda: 0,
    ) -> list[ResultT]:
        """Run all coroutines until these tasks have ended, in all processes, which call this
        together; return their results, in order. Raise the error of any coroutine.

        Args:
            at_least: called when the tasks have ended; returns the number of tokens to draw in this
                call, unless no text is left.
        """
        with self._run.computing():
            self._loop.run_until_complete(self._compute(tasks, at_least))
            self._run.pause()
        return [task.result() for task in tasks]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the coroutines in another thread within the block. Their texts wait, so that the
        block may change the weights. The end of the block waits for code that does not await."""
        thread = threading.Thread(target=self._run_beside, name="rollouts", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()

    @torch.no_grad()  # of each thread
    def _run_beside(self) -> None:
        self._loop.run_forever()

    async def text(self, row: Row) -> Generation:
        """Return the continuation of a row. If its task is canceled, the row leaves the batch."""
        ended: asyncio.Future[Generation] = self._loop.create_future()

        def end(generation: Generation) -> None:
            if not ended.done():
                ended.set_result(generation)

        row.end = end
        self._run.add(row)
        self._changed.set()
        try:
            return await ended
        finally:
            row.is_done = True

    async def _compute(
        self, tasks: "Sequence[asyncio.Task[object]]", at_least: Callable[[], int]
    ) -> None:
        begun_at = self._run.n_drawn
        ends_at: int | None = None
        while True:
            # Tasks wait for tasks that wait for texts: each call lets one level continue.
            for _ in range(_SETTLING):
                await asyncio.sleep(0)
            if ends_at is None and all(task.done() for task in tasks):
                ends_at = begun_at + at_least()
            self._run.has_tasks = ends_at is None or (
                self._run.n_drawn < ends_at and self._run.has_texts
            )
            self._changed.clear()
            needs = self._run.step()
            if not needs.has_tasks:
                return
            if not needs.has_rows:
                await self._wait()

    async def _wait(self) -> None:
        """Wait until a coroutine has ended or awaits a text, here or in another process."""
        if self._run.is_alone:
            await self._changed.wait()
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL_SECONDS)

    def _on_end(self, task: "asyncio.Task[object]") -> None:
        self._changed.set()
        if task.cancelled():
            self._run.fail(UserError("a coroutine of Engine.run was canceled by other code"))
        elif error := task.exception():
            self._run.fail(cast(Exception, error))


def end_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks of a loop, wait for their cleanup, log its errors, and close the loop, as
    `asyncio.run` does."""
    try:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        for result in loop.run_until_complete(_results(tasks)):
            if isinstance(result, Exception) and not isinstance(result, asyncio.CancelledError):
                logger.warning("the cleanup of a canceled coroutine failed: %s", in_words(result))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


async def _results(tasks: "Iterable[asyncio.Task[object]]") -> list[object]:
    return await asyncio.gather(*tasks, return_exceptions=True)


def is_in_loop() -> bool:
    """Return whether an asyncio loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True

"""The scheduler: a thread that runs the engine. Jobs join and leave between tokens."""

import asyncio
import contextlib
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchtitan.components.generation import Engine, Sampling
from torchtitan.components.generation.row import TextCoroutine
from torchtitan.components.generation.sampling import RandomNumbers, draw
from torchtitan.components.serving.errors import RequestError
from torchtitan.components.serving.jobs import Job, Update
from torchtitan.components.serving.scoring import score_prompts
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.cpu_products import onednn_products
from torchtitan.tools.errors import UserError, in_words
from torchtitan.tools.logging import logger

_PROMPT_TOKENS = 8192
"""Tokens of prompts, with padding, that are computed between two tokens of the other texts; a
longer prompt is computed alone."""

_RETRY_SECONDS = 1
_FAILED = "the server failed; its log says why"


@dataclass(slots=True)
class Totals:
    """Numbers since the start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cancelled: int = 0
    failed: int = 0


class Ticket:
    """The updates of submitted jobs, for one asyncio task. Use it in a `with` block, whose end
    cancels jobs that have not ended."""

    def __init__(self, jobs: Sequence[Job], scheduler: "Scheduler"):
        self._jobs = jobs
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        for job in jobs:
            job.deliver = self._post

    def _post(self, update: Update) -> None:
        self._scheduler.post(self._loop, self._updates, update)

    async def updates(self) -> AsyncIterator[Update]:
        """Yield updates until all jobs have ended. Raise the `RequestError` of a job."""
        n_left = len(self._jobs)
        while n_left:
            update = await self._updates.get()
            if update.error is not None:
                raise update.error
            yield update
            n_left -= update.is_last

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *exception: object) -> None:
        self._scheduler.cancel(self._jobs)


class Scheduler:
    """Runs jobs on one model.

    Args:
        max_rows: jobs that are computed at a time.
        max_queue: jobs that may wait for a row.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, *, max_rows: int = 64, max_queue: int = 256
    ):
        self.max_queue = max_queue
        self.totals = Totals()
        self._tokenizer = tokenizer
        self._max_rows = max_rows
        self._next_model: tuple[nn.Module, Callable[[], None]] | None = None
        self._use(model)
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._changed = threading.Condition()
        self._is_closing = False
        self._outbox: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[Update], Update]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _use(self, model: nn.Module) -> None:
        self._engine = Engine(model, sampling=Sampling(), max_rows=self._max_rows)
        self._model = model
        self._device = next(model.parameters()).device

    def replace(self, model: nn.Module, on_use: Callable[[], None]) -> None:
        """Use another model, with the same tokenizer and context, as soon as the running texts have
        ended; waiting ones are computed by it. `on_use` is called then, in the scheduler's thread,
        unless a third model comes first."""
        with self._changed:
            self._next_model = (model, on_use)
            self._changed.notify()

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        """True while jobs are computed."""
        return self._thread.is_alive() and not self._is_closing

    def start(self) -> None:
        """Start the thread, unless it has been started."""
        with self._changed:
            if self._thread.ident is None and not self._is_closing:
                self._thread.start()

    def close(self) -> None:
        """End all jobs with an error, and the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, jobs: Sequence[Job]) -> Ticket:
        """Queue the jobs of a request; call it in an asyncio task. Raise `RequestError` if there is
        no room for them, or the server is closing."""
        ticket = Ticket(jobs, self)
        with self._changed:
            if not self.is_alive:
                raise RequestError("the server is closing", status=503)
            self.check_room(len(jobs), 1)
            self._waiting += jobs
            self._changed.notify()
        return ticket

    def check_room(self, n_prompts: int, n: int) -> None:
        """Raise `RequestError` if `n` texts of each prompt may not wait now. Call it before
        preparing them."""
        n_jobs = n_prompts * n
        if n_jobs > self.max_queue:
            param = "prompt" if n == 1 else "n"
            raise RequestError(
                f"the request asks for {n_jobs:,} texts (prompts: {n_prompts:,}, n: {n}), more "
                f"than the {self.max_queue:,} that may wait here (--max_queue); send fewer "
                "prompts, or a smaller n",
                param=param,
                code="invalid_value",
            )
        n_waiting = self.n_waiting
        if n_waiting + n_jobs <= self.max_queue:
            return
        raise RequestError(
            f"{n_waiting} texts wait already, and at most {self.max_queue} may (--max_queue); try "
            "again later",
            status=429,
            code="queue_full",
            headers={"Retry-After": str(_RETRY_SECONDS)},
        )

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Free the rows of jobs that have not ended, at the next token."""
        for job in jobs:
            if not job.is_done:
                job.is_cancelled = True

    def post(
        self, loop: asyncio.AbstractEventLoop, queue: "asyncio.Queue[Update]", update: Update
    ) -> None:
        """Deliver an update to a task of a loop, with the others of this token."""
        self._outbox.append((loop, queue, update))

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        by_loop: dict[asyncio.AbstractEventLoop, list[Any]] = {}
        for loop, queue, update in outbox:
            by_loop.setdefault(loop, []).append((queue, update))
        for loop, updates in by_loop.items():
            with contextlib.suppress(RuntimeError):  # a closed loop waits for nothing
                loop.call_soon_threadsafe(_put, updates)

    def _run(self) -> None:
        """Run the engine until the scheduler is closed. After an error, the next jobs start it
        again."""
        while not self._is_closing:
            try:
                if self._wait():
                    self._engine.serve(self._arrivals)
            except Exception as error:
                self._fail(error)
        self._end_all(RequestError("the server is closing", status=503))

    def _wait(self) -> bool:
        """Wait for a job or another model, which is used from now on; return whether there are
        jobs."""
        with self._changed:
            while not (self._waiting or self._is_closing or self._next_model is not None):
                self._changed.wait()
            change, self._next_model = self._next_model, None
        if change is not None:
            model, on_use = change
            self._use(model)
            on_use()
        return bool(self._waiting)

    def _fail(self, error: Exception) -> None:
        message = _FAILED
        if isinstance(error, UserError):
            message = str(error)
            logger.error("generation failed: %s", error)
        else:
            logger.error("generation failed: %s\n%s", in_words(error), traceback.format_exc())
        # Its frames hold tensors of the batch.
        error.__traceback__ = None
        self._end_all(RequestError(message, status=500))

    def _end_all(self, error: RequestError) -> None:
        with self._changed:
            jobs = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
        for job in jobs:
            self.totals.failed += not job.is_done
            job.fail(error)
        self._flush()

    def _arrivals(self, n_free: int) -> Sequence[TextCoroutine[None]] | None:
        """Return the jobs that join, see `Engine.serve`."""
        self._flush()
        with self._changed:
            has_waiting = self._drop_cancelled()
            is_changing = self._next_model is not None
            if self._is_closing or not (self._running or has_waiting and not is_changing):
                return None
            if is_changing:
                return []
            jobs = self._choose(n_free)
            self._running.update(jobs)
        self.totals.prompt_tokens += sum(len(job.prompt) for job in jobs)
        for job in jobs:
            job.begin(self._tokenizer)
        if scored := [job for job in jobs if job.scores_prompt]:
            self._score(scored)
        return [self._text(job) for job in jobs if not job.is_done]

    def _drop_cancelled(self) -> bool:
        """Remove jobs that nobody waits for; return whether others wait for a row."""
        n_waiting = len(self._waiting)
        self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
        self.totals.cancelled += n_waiting - len(self._waiting)
        return bool(self._waiting)

    def _choose(self, n_free: int) -> list[Job]:
        """Take the next jobs, as many as there are rows and as `_PROMPT_TOKENS` allows."""
        chosen: list[Job] = []
        prompts: set[tuple[int, ...]] = set()
        longest = 0
        while self._waiting and len(chosen) < n_free:
            prompt = tuple(self._waiting[0].prompt)
            longest = max(longest, len(prompt))
            n_prompts = len(prompts | {prompt})
            if chosen and n_prompts * longest > _PROMPT_TOKENS:
                break
            prompts.add(prompt)
            chosen.append(self._waiting.popleft())
        return chosen

    async def _text(self, job: Job) -> None:
        try:
            await self._engine.generate(
                job.prompt,
                max_new_tokens=job.max_new_tokens,
                key=job.key,
                on_token=lambda token: self._take(job, token),
                sampling=job.sampling,
                n_top=job.n_top,
                into=job.generation,
            )
        finally:
            self._leave(job)

    def _take(self, job: Job, token: int) -> bool:
        self.totals.generated_tokens += 1
        try:
            return job.take(token)
        except Exception as error:  # of a tokenizer, for example; other jobs continue
            logger.error("a text failed: %s\n%s", in_words(error), traceback.format_exc())
            self.totals.failed += 1
            job.fail(RequestError(_FAILED, status=500))
            return True

    def _leave(self, job: Job) -> None:
        if job in self._running and not job.is_done:
            if job.max_new_tokens == 0:
                job.finish("length")
            elif job.is_cancelled:
                self.totals.cancelled += 1
            else:
                return  # an error ends it
        self._running.discard(job)

    def _score(self, jobs: Sequence[Job]) -> None:
        """Compute the scores of prompts, and the end of jobs that need at most one more token."""
        unique = list(dict.fromkeys(tuple(job.prompt) for job in jobs))
        n_top = max(job.n_top for job in jobs)
        with onednn_products():
            found = score_prompts(self._model, unique, n_top, self._device)
        scores = dict(zip(unique, found, strict=True))
        for job in jobs:
            entries, logits_V = scores[tuple(job.prompt)]
            job.add_prompt([entry._replace(top=entry.top[: job.n_top]) for entry in entries])
            if job.max_new_tokens == 0:
                job.finish("length")
            elif job.max_new_tokens == 1:
                self._draw(job, logits_V)
            if job.is_done:
                self._running.discard(job)

    def _draw(self, job: Job, logits_V: torch.Tensor) -> None:
        """Draw the only token of a job from the logits after its prompt."""
        logits_BV = logits_V[None]
        drawn = draw(logits_BV, job.sampling, [RandomNumbers(job.key)])
        token = int(drawn.item())
        logprobs_V = logits_V.log_softmax(dim=-1)
        top = logprobs_V.topk(job.n_top)
        job.generation.ids.append(token)
        job.generation.logprobs.append(float(logprobs_V[token]))
        job.generation.top_logprobs.append(
            list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        )
        self._take(job, token)


def _put(updates: Sequence[tuple["asyncio.Queue[Update]", Update]]) -> None:
    for queue, update in updates:
        queue.put_nowait(update)

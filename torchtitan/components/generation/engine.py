"""The generation engine: coroutines await continuations, which the model in training computes in
one batch; and `generate`, for prompts that are known in advance."""

import inspect
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.components.generation.decode_graph import DecodeGraph, graphs_for
from torchtitan.components.generation.kv_cache import CachedAttention, KVCache
from torchtitan.components.generation.sampling import Sampling, draw, generator_of, sampled_logprobs
from torchtitan.components.generation.session import Session
from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.reader import ImageReader
from torchtitan.distributed import context_parallel
from torchtitan.distributed.parallelize import free_gathered_weights
from torchtitan.distributed.process_group import gather_objects
from torchtitan.distributed.whole_tensors import sequence_splits, whole, whole_logits
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.images import ImageInputs
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform
from torchtitan.tools.cpu_products import onednn_products
from torchtitan.tools.errors import UserError, in_words, require
from torchtitan.tools.sharded import is_dtensor
from torchtitan.tools.torch_private import forward_pre_hooks

OnToken = Callable[[int], bool]
"""Called with each new token except stop tokens; return True to end the text."""

Arrivals = Callable[[int], Sequence[Coroutine[Any, Any, Any]] | None]
"""Called between two tokens with the number of free rows, without `max_rows` a very large one;
returns coroutines that start now. None: end, for example because no text is left, so that the
cache's memory is free until more arrive."""

ResultT = TypeVar("ResultT")

NOT_FINITE_HINT = (
    "the weights may be damaged, training may have diverged, or values are too large for --dtype"
)
"""Possible causes of NaN in a model's output."""

_NOT_IN_RUN = (
    "`engine.generate` can be awaited only in coroutines that the same engine runs: "
    "engine.run([rollout(…), …]), or await asyncio.to_thread(engine.run, [rollout(…), …]) in an "
    "asyncio program"
)
_NOT_A_TEXT = (
    "a coroutine that Engine.serve runs can await only this engine's `generate`, since no asyncio "
    "loop runs it; Engine.run has one"
)

_PADDING = 0  # arbitrary: nothing attends to it
# slots that the cache of `Engine.serve` reserves at a time, since most texts end before their limit
_GROWTH = 256


@dataclass(slots=True)
class Generation:
    """Continuation of one prompt."""

    ids: list[int] = field(default_factory=list)
    """New tokens, ending with the stop token, if any."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithm of each new token's probability at temperature 1, before top_k, top_p and
    min_p; with `logprobs_of="sampling"`, in the distribution that the token was drawn from."""
    finish_reason: Literal["stop", "length"] = "length"
    """`stop`: ended by a stop token or `on_token`. `length`: reached max_new_tokens."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each new token, the most probable ones with their log-probabilities, in descending
    order."""
    versions: list[int] = field(default_factory=list)
    """For each new token, `Engine.version` when it was drawn."""


@dataclass(slots=True, eq=False)
class _Row:
    """A text in the batch, or waiting for room in it."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    generator: torch.Generator
    on_token: OnToken | None
    sampling: Sampling
    n_top: int
    generation: Generation
    images: Sequence[ImageFile] = ()
    decoded: list[Any] = field(default_factory=list)
    """Its images, while it is in the batch."""
    is_done: bool = False
    start: tuple[int, ...] = field(init=False)
    """Tokens that are computed before the row joins the batch."""
    end: Callable[[Generation], None] = field(init=False)
    """Passes the finished text to what awaits it."""

    def __post_init__(self) -> None:
        self.start = self.prompt

    def __await__(self) -> Generator["_Row", Generation, Generation]:
        return (yield self)

    @property
    def tokens(self) -> list[int]:
        """All tokens; of a finished row, which may stay in the batch, a single one that is not
        read."""
        return [_PADDING] if self.is_done else [*self.prompt, *self.generation.ids]

    @property
    def n_tokens(self) -> int:
        return 1 if self.is_done else len(self.prompt) + len(self.generation.ids)


@dataclass(frozen=True, slots=True, eq=False)
class _Prompts:
    """Computed prompts from which waiting texts still start."""

    cache: KVCache
    row_of: dict[tuple[int, ...], int]
    logits_NV: Tensor


class _Needs(NamedTuple):
    """Tasks of a step that any process needs."""

    has_rows: bool
    has_tasks: bool
    """Whether coroutines have not ended that may await something else."""
    decoding: bool
    prefilling: bool
    reading: bool
    """Reading images, for which processes share the weights of a vision tower."""
    has_failed: bool


class Engine:
    """Continue texts in batches with a model that is plain or under FSDP, DDP, tensor parallelism,
    activation checkpointing or compilation (blocks run uncompiled). Raises `UserError` under
    pipeline or context parallelism, and if an option is out of range.

    A finished text makes room for the next one. A prompt that several waiting texts share is
    computed once. Each text has its own random numbers, so that it depends only on weights, prompt
    and key, up to the rounding of logits.

    Args:
        sampling: without its seed, which `generate` gets as the key.
        logprobs_of: distribution of `Generation.logprobs`: the model's at temperature 1, or the one
            that tokens are drawn from, which training corrects for.
        stop_ids: tokens that end a text; not passed to `on_token`.
        max_rows: texts that are computed at a time; None: all.
        use_cache: use a key/value cache; otherwise every token needs a forward pass over all
            previous tokens.
        group: processes that run forward passes together (FSDP, tensor parallelism) until all texts
            are finished. Their texts may differ, except under tensor parallelism: its processes
            must await the same texts in the same order, so before its last text a coroutine may
            await nothing else.
        reader: reads the images of prompts, for a class of transformers that is not sharded by
            tensor parallelism. The tokens of images also end a text, since no model writes images.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sampling: Sampling,
        logprobs_of: Literal["model", "sampling"] = "model",
        stop_ids: AbstractSet[int] = frozenset(),
        max_rows: int | None = None,
        use_cache: bool = True,
        group: dist.ProcessGroup | None = None,
        reader: ImageReader | None = None,
    ):
        _reject_partial_model(model)
        sampling.validate()
        require(max_rows is None or max_rows >= 1, "max_rows", max_rows, "at least 1")
        self._model = cast(Any, model)
        if not hasattr(getattr(model, "config", None), "max_seq_len"):
            name = type(model).__name__
            raise UserError(
                f"a {name} cannot generate text: it is a plain nn.Module, not a torchtitan "
                "BaseModel"
            )
        self.context: int = self._model.config.max_seq_len
        self.version = 0
        """Number of the weights, which whoever changes them sets."""
        self._sampling = sampling
        self._logprobs_of = logprobs_of
        self._stop_ids = stop_ids if reader is None else stop_ids | reader.image_ids
        self._reader = reader
        self._group = group
        self._max_rows, self._use_cache = max_rows, use_cache
        self._is_advancing = False  # whether code of a coroutine without a loop is running
        self._session: Session | None = None
        self._running_now = threading.Lock()
        self._degree, self._device = sequence_splits(self._model), _device_of(model)
        if reader and not (use_cache and self._model.generation_cache(lambda: None)):
            name = type(getattr(model, "model", model)).__name__
            raise UserError(f"{name} cannot generate from images here: its cache is not used")

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        key: str,
        on_token: OnToken | None = None,
        images: Sequence[ImageFile] = (),
        sampling: Sampling | None = None,
        n_top: int = 0,
        into: Generation | None = None,
    ) -> Generation:
        """Return a continuation of a prompt, token ids, of at most `max_new_tokens`, including the
        stop token; await it in a coroutine that `run` or `serve` runs, or in a task that it
        creates. Random numbers depend on `key`. Raise `UserError` elsewhere, if the prompt is empty
        or has an unknown token, if prompt and continuation exceed the context, or if the prompt has
        other tokens of images than its `images`.

        Args:
            sampling: settings of this text, without its seed; None: the engine's.
            n_top: number of most probable tokens to return for each token.
            into: an empty generation to fill, which `on_token` may read.
        """
        session = self._session
        if session is not None and not session.is_here:
            session = None
        if session is None and not self._is_advancing:
            raise UserError(_NOT_IN_RUN)
        _check(self._model, prompt, max_new_tokens)
        if self._reader:
            self._reader.check(prompt, images)
        elif images:
            raise UserError("an engine without reader of images generates from text only")
        if sampling is not None:
            sampling.validate()
        require(0 <= n_top <= self._model.config.vocab_size, "n_top", n_top, "0 to the vocabulary")
        generation = into or Generation()
        if max_new_tokens == 0:
            return generation
        row = _Row(
            tuple(prompt),
            max_new_tokens,
            generator_of(key),
            on_token,
            sampling or self._sampling,
            n_top,
            generation,
            images,
        )
        return await (row if session is None else session.text(row))

    @torch.no_grad()
    def serve(self, arrivals: Arrivals) -> None:
        """Run the coroutines that `arrivals` returns between two tokens, as `run` does, until it
        returns None; their results are dropped. Rows join and leave the batch at every token, and
        the cache grows with them. Raise the error of a coroutine, and `UserError` as `run` does, or
        if several processes share the model: the others do not know what arrives."""
        if self._group is not None:
            raise UserError("Engine.serve needs a model in one process; set group to None")
        self._acquire()
        try:
            run = _Run(self)
            try:
                run.serve(arrivals)
            finally:
                _close(run.coroutines)
        finally:
            self._running_now.release()

    def begin_session(self, session: Session) -> "_Run":
        """Let the texts of a session be awaited, and return their batch. Raise `UserError` if the
        engine is already running."""
        self._acquire()
        self._session = session
        return _Run(self)

    def leave_session(self) -> None:
        """Refuse further texts of the session."""
        self._session = None

    def end_session(self) -> None:
        """Let the engine be used again."""
        self._running_now.release()

    def _acquire(self) -> None:
        if not self._running_now.acquire(blocking=False):
            raise UserError(
                "Engine.run is already running, and cannot be called in its coroutines or other "
                "threads"
            )

    def run(self, texts: Sequence[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
        """Return the results, in order, of coroutines, with the model in evaluation mode. An
        asyncio loop runs them in this thread, so that they may await `generate` and anything else.
        It blocks: asyncio programs call it in a thread. Raise the error of a coroutine, in other
        processes as a `UserError`, and `UserError` if logits are not finite, a loop already runs in
        this thread, or the engine is already running. An error cancels the other coroutines."""
        if not all(map(inspect.iscoroutine, texts)):
            raise UserError("Engine.run takes a list of coroutines, such as [engine.generate(…)]")
        try:
            with Session(self) as session:
                results: list[ResultT] = session.finish(session.start(texts))
                return results
        finally:
            _close(texts)

    @torch.no_grad()
    def _run_plain(self, texts: Sequence[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
        """Return the results of coroutines that await `generate` and nothing else, without a loop
        of asyncio, so that one may run in this thread."""
        self._acquire()
        try:
            return _Run(self).finish(texts)
        finally:
            try:
                _close(texts)
            finally:
                self._running_now.release()

    @contextmanager
    def _advancing(self) -> Iterator[None]:
        """Allow `generate` within the block."""
        self._is_advancing = True
        try:
            yield
        finally:
            self._is_advancing = False


class _Run:
    """The texts that wait for room, the batch, and coroutines that no asyncio loop runs."""

    def __init__(self, engine: Engine):
        model = engine._model
        self._engine = engine
        self._model = model
        self._group = engine._group
        self._degree = engine._degree
        self._device = engine._device
        self.has_tasks = True
        self.n_drawn = 0
        """Tokens drawn so far."""
        self._texts: dict[int, Coroutine[Any, Any, Any]] = {}
        self._n_started = 0
        self._growth: int | None = None
        self._results: dict[int, Any] = {}
        self._error: Exception | None = None
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._logits_BV: Tensor | None = None
        self._held: _Prompts | None = None
        self._graph: DecodeGraph | None = None
        self._graph_of = graphs_for(model, partial(_logits_at, model, 0))
        self._cache: Any = (
            model.generation_cache(lambda: KVCache(model, 0)) if engine._use_cache else None
        )
        # Otherwise a new row needs a pass over all tokens of all rows.
        self._joins = type(self._cache) is KVCache

    @property
    def coroutines(self) -> list[Coroutine[Any, Any, Any]]:
        """Coroutines that have not ended."""
        return list(self._texts.values())

    def finish(self, texts: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Return the results of all coroutines."""
        with self.computing():
            self._start(texts)
            while self.step().has_rows:
                pass
        return [self._results[number] for number in range(len(texts))]

    def serve(self, arrivals: Arrivals) -> None:
        """Run the coroutines that arrive until there are no more."""
        self._growth = _GROWTH
        with self.computing():
            while True:
                n_alive = sum(not row.is_done for row in self._rows)
                n_free = self._room(n_alive) - len(self._waiting)
                texts = arrivals(max(n_free, 0))
                if texts is None:
                    return
                self._start(texts)
                self._results.clear()
                self.step()
                if self._error is not None:
                    raise self._common_error()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Have the model in evaluation mode, and the cache in memory, within the block."""
        try:
            with evaluating(self._model), onednn_products(), self._cache or nullcontext():
                yield
        finally:
            # The memory is free for training, even if an error keeps this object.
            self._forget()

    def _forget(self) -> None:
        """Free the memory of a batch without rows."""
        self._graph = None
        self._held = None
        self._logits_BV = None
        if self._cache is not None:
            self._cache.clear()

    def _start(self, texts: Sequence[Coroutine[Any, Any, Any]]) -> None:
        first = self._n_started
        self._n_started += len(texts)
        self._texts |= enumerate(texts, first)
        for number in range(first, self._n_started):
            self._advance(number, None)

    def _room(self, n_alive: int) -> int:
        """Return the number of rows that the batch has room for."""
        most = self._engine._max_rows
        return sys.maxsize if most is None else most - n_alive

    def _advance(self, number: int, generation: Generation | None) -> None:
        """Continue a coroutine until it awaits its next text."""
        text = self._texts[number]
        with self._engine._advancing():
            try:
                row = text.send(generation)
                if not isinstance(row, _Row):
                    text.throw(UserError(_NOT_A_TEXT))
                    raise UserError(_NOT_A_TEXT)  # the coroutine has caught the first one
            except StopIteration as end:
                self._results[number] = end.value
                del self._texts[number]
            except Exception as error:
                self._error = self._error or error
                del self._texts[number]
            else:
                row.end = partial(self._advance, number)
                self._waiting.append(row)

    @property
    def has_texts(self) -> bool:
        """Whether a text of this process has not ended."""
        return any(not row.is_done for row in itertools.chain(self._rows, self._waiting))

    @property
    def is_alone(self) -> bool:
        """Whether no other process computes with this one."""
        return self._group is None

    def add(self, row: _Row) -> None:
        """Let a text join as soon as there is room."""
        self._waiting.append(row)

    def fail(self, error: Exception) -> None:
        """Raise an error in the next step, in all processes."""
        self._error = self._error or error

    def pause(self) -> None:
        """Let the texts in the batch wait, before all others; they continue with the weights of
        that time, which recompute their keys and values."""
        alive = [row for row in self._rows if not row.is_done]
        for row in alive:
            row.start = tuple(row.tokens)
        self._waiting.extendleft(reversed(alive))
        self._rows = []

    def step(self) -> _Needs:
        """Append a token to each row and let waiting texts join, if any process has some; return
        what the processes needed. Each process takes the same number of forward passes."""
        graph = self._graph  # it must not be destroyed before the step ends, which waits for it
        n_alive = sum(not row.is_done for row in self._rows)
        chosen = self._choose(n_alive)
        self._decode_images(chosen)
        new = self._new_prompts(chosen)
        images = self._read_images(chosen)
        own = _Needs(
            has_rows=n_alive + len(chosen) > 0,
            has_tasks=self.has_tasks,
            decoding=n_alive > 0 or not self._joins,
            prefilling=bool(new),
            reading=images is not None,
            has_failed=self._error is not None,
        )
        needs = _Needs(*_any_process(own, self._group))
        if needs.has_failed:
            raise self._common_error()
        if not (needs.has_rows and needs.has_tasks):
            self._waiting.extendleft(reversed(chosen))
            return needs
        if chosen and not self._joins:
            self._rows = [row for row in self._rows if not row.is_done] + chosen
        if needs.decoding:
            reader = self._engine._reader if needs.reading else None
            self._decode(bool(chosen) and not self._joins, images, reader)
        if self._joins:
            self._join(chosen, new, prefills=needs.prefilling)
        self._sample()
        del graph
        return needs

    def _choose(self, n_alive: int) -> list[_Row]:
        """Take the waiting texts for which there is room."""
        n_free = self._room(n_alive)
        chosen: list[_Row] = []
        while self._waiting and len(chosen) < n_free:
            row = self._waiting.popleft()
            if not row.is_done:  # nothing awaits it any more
                chosen.append(row)
        return chosen

    def _decode_images(self, chosen: Sequence[_Row]) -> None:
        """Decode the images of rows, those of one prompt once. The files may have changed."""
        decoded: dict[str, Any] = {}
        try:
            for row in chosen:
                for image in row.images:
                    if image.digest not in decoded:
                        decoded[image.digest] = image.decode()
                row.decoded = [decoded[image.digest] for image in row.images]
        except Exception as error:  # of this process alone
            self._error = self._error or error

    def _read_images(self, chosen: Sequence[_Row]) -> ImageInputs | None:
        """Return the images of the next forward pass if it computes prompts that may have some.
        What the processor refuses must be known before all processes begin the pass."""
        reader = self._engine._reader
        boundaries = self._model.cache_boundaries()
        starts = bool(chosen) or any(row.n_tokens - 1 in boundaries for row in self._rows)
        if reader is None or not starts or self._error is not None:
            return None
        rows = self._rows
        if chosen:
            rows = [row for row in rows if not row.is_done] + list(chosen)
        tokens_BL, _ = _left_padded([row.tokens for row in rows], self._degree)
        try:
            return reader.inputs([[] if row.is_done else row.decoded for row in rows], tokens_BL)
        except Exception as error:  # of this process alone
            self._error = error
            return None

    def _new_prompts(self, chosen: Sequence[_Row]) -> list[tuple[int, ...]]:
        """Return the prompts that must be computed before the chosen rows join."""
        if not self._joins:
            return []
        known = self._held.row_of if self._held else {}
        return list(dict.fromkeys(row.start for row in chosen if row.start not in known))

    def _decode(
        self, is_new_batch: bool, images: ImageInputs | None, reader: ImageReader | None
    ) -> None:
        """Compute the logits of the next token of all rows.

        Args:
            is_new_batch: whether all prompts are computed.
            images: those of the prompts, see `_read_images`.
            reader: given if any process reads images in this pass.
        """
        rows = self._rows
        cache = self._cache
        degree = self._degree
        if all(row.is_done for row in rows):
            self._pass_without_rows(reader)
            return
        boundaries = self._model.cache_boundaries()
        if cache is None or is_new_batch or any(row.n_tokens - 1 in boundaries for row in rows):
            tokens_BL, positions_BL = _left_padded([row.tokens for row in rows], degree)
            if cache is None:
                attention = AttentionMetadata.from_positions(positions_BL).to(self._device)
                self._logits_BV = _logits_at(self._model, -1, tokens_BL.to(self._device), attention)
                return
            cache.clear()
            n_kept = tokens_BL.shape[1]
        else:
            # Tensor parallelism needs equally many tokens per rank: all after the first are
            # padding, and not kept.
            tokens_BL = torch.tensor([[row.tokens[-1]] * degree for row in rows])
            positions_BL = torch.tensor([[row.n_tokens - 1] * degree for row in rows])
            n_kept = 1
            if self._growth and self._joins and cache.n_slots + degree > cache.max_slots:
                cache.max_slots += self._growth
                # A graph's memory is that of the old slots.
                self._graph = self._graph_of(cache) if self._graph_of else None
            logits_BV = self._graph.logits(tokens_BL, positions_BL) if self._graph else None
            if logits_BV is not None:
                self._logits_BV = logits_BV
                return
        if images is None and reader is not None:
            images = reader.inputs([[] for _ in rows], tokens_BL)  # a blank image
        if images is not None:
            images = images.to(self._device)
        self._logits_BV = self._cached_logits(cache, tokens_BL, positions_BL, n_kept, images)

    def _cached_logits(
        self,
        cache: Any,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        n_kept: int,
        images: ImageInputs | None = None,
    ) -> Tensor:
        attention = cache.attention(positions_BL.to(self._device))
        places_BL = torch.arange(positions_BL.shape[1]).expand_as(positions_BL)
        if (
            isinstance(attention, CachedAttention)
            and not cache.n_slots
            and torch.equal(positions_BL, places_BL)
        ):
            # no padding, and no keys but the new ones: no mask
            attention = replace(attention, kernel="causal")
        tokens_BL = tokens_BL.to(self._device)
        logits_BV = _logits_at(self._model, n_kept - 1, tokens_BL, attention, images)
        if self._degree > 1 and cache.states:
            raise UserError(
                f"a key/value cache under tensor parallelism (degree {self._degree}) supports no "
                "recurrent layers: padding tokens would change their states; generate without "
                "cache (use_cache=False)"
            )
        cache.advance(n_kept)
        return logits_BV

    def _pass_without_rows(self, reader: ImageReader | None = None) -> None:
        """Take part in a forward pass of the other processes, which may read images."""
        tokens_BL = torch.full((1, self._degree), _PADDING)
        images = reader.inputs([[]], tokens_BL).to(self._device) if reader else None
        attention = AttentionMetadata.of_rows(*tokens_BL.shape)
        _logits_at(self._model, 0, tokens_BL.to(self._device), attention, images)

    def _join(self, chosen: list[_Row], new: list[tuple[int, ...]], *, prefills: bool) -> None:
        """Compute new prompts, and let the chosen rows join the batch after their prompts. Finished
        rows leave it if room is needed, or if they are the majority."""
        held = [self._held] if self._held else []
        if new:
            self._held = self._compute_prompts(new)
            held.append(self._held)
        elif prefills:
            self._pass_without_rows()
        kept = [index for index, row in enumerate(self._rows) if not row.is_done]
        if chosen or 0 < 2 * len(kept) < len(self._rows):
            self._assemble(kept, chosen, held)
        if self._held and not any(row.start in self._held.row_of for row in self._waiting):
            self._held = None

    def _compute_prompts(self, prompts: list[tuple[int, ...]]) -> _Prompts:
        tokens_BL, positions_BL = _left_padded(prompts, self._degree)
        length = tokens_BL.shape[1]
        cache = KVCache(self._model, length + self._degree)
        logits_NV = self._cached_logits(cache, tokens_BL, positions_BL, length)
        return _Prompts(cache, {prompt: index for index, prompt in enumerate(prompts)}, logits_NV)

    def _assemble(self, kept: list[int], chosen: Sequence[_Row], held: Sequence[_Prompts]) -> None:
        """Make a batch of the rows with the numbers `kept` and the chosen rows, whose prompts
        are `held`."""
        rows = [self._rows[index] for index in kept]
        sources = [(self._cache, kept)]
        logits = [] if self._logits_BV is None else [self._logits_BV[kept]]
        for prompts in held:
            joining = [row for row in chosen if row.start in prompts.row_of]
            places = [prompts.row_of[row.start] for row in joining]
            sources.append((prompts.cache, places))
            logits.append(prompts.logits_NV[places])
            rows += joining
        n_slots = max(row.n_tokens for row in rows)
        # Padding before the first token and, under tensor parallelism, after the last.
        longest = max(row.max_new_tokens - len(row.generation.ids) for row in rows)
        longest = longest if self._growth is None else min(longest, self._growth)
        self._cache.max_slots = n_slots + longest + 2 * self._degree
        self._cache.assemble(sources, n_slots)
        if self._graph_of:
            self._graph = self._graph_of(self._cache)
        self._rows, self._logits_BV = rows, torch.cat(logits)

    def _sample(self) -> None:
        """Draw a token for each row, and continue the coroutines of those that end."""
        if all(row.is_done for row in self._rows):
            return
        assert self._logits_BV is not None
        logits_BV = self._logits_BV.float()
        sums_B = logits_BV.logsumexp(dim=-1)
        groups = self._rows_by_settings()
        tokens_B = self._draw(logits_BV, groups)
        logprobs_B = logits_BV.gather(1, tokens_B[:, None])[:, 0] - sums_B
        if self._engine._logprobs_of == "sampling":
            for sampling, places in groups:
                if not sampling.is_plain:
                    logprobs_B[places] = sampled_logprobs(
                        logits_BV[places], sampling, tokens_B[places]
                    )
        # Read once, since reading waits for the device. A float32 holds any token id exactly.
        drawn = torch.stack(
            (tokens_B.to(sums_B), logprobs_B, sums_B.isfinite().to(sums_B))
        ).T.tolist()
        if not all(
            row.is_done or is_finite
            for row, (_, _, is_finite) in zip(self._rows, drawn, strict=True)
        ):
            # The most probable token would silently be token 0.
            self._error = UserError(
                f"the model's logits are not finite (NaN or infinite); {NOT_FINITE_HINT}"
            )
            return
        tops = self._most_probable(logits_BV, sums_B)
        for row, (drawn_id, logprob, _), top in zip(self._rows, drawn, tops, strict=True):
            if row.is_done:
                continue
            token = int(drawn_id)
            generation = row.generation
            if row.n_top:
                generation.top_logprobs.append(top[: row.n_top])
            generation.ids.append(token)
            generation.logprobs.append(logprob)
            generation.versions.append(self._engine.version)
            self.n_drawn += 1
            stopped = token in self._engine._stop_ids
            if not stopped and row.on_token is not None:
                stopped = row.on_token(token)
            if stopped:
                generation.finish_reason = "stop"
            if stopped or len(generation.ids) == row.max_new_tokens:
                row.is_done = True
                row.end(generation)

    def _rows_by_settings(self) -> list[tuple[Sampling, list[int]]]:
        """Return the places of rows with equal settings of sampling, without finished rows."""
        places_of: dict[tuple[Any, ...], list[int]] = {}
        for place, row in enumerate(self._rows):
            if not row.is_done:
                places_of.setdefault(row.sampling.settings, []).append(place)
        return [(self._rows[places[0]].sampling, places) for places in places_of.values()]

    def _draw(self, logits_BV: Tensor, groups: Sequence[tuple[Sampling, list[int]]]) -> Tensor:
        """Draw a token for each row, for all rows with equal settings at once; any token for
        finished rows."""
        rows = self._rows
        if len(groups) == 1:
            return draw(logits_BV, groups[0][0], [row.generator for row in rows])
        tokens_B = torch.zeros(len(rows), dtype=torch.int64, device=logits_BV.device)
        for sampling, places in groups:
            generators = [rows[place].generator for place in places]
            tokens_B[places] = draw(logits_BV[places], sampling, generators)
        return tokens_B

    def _most_probable(
        self, logits_BV: Tensor, sums_B: Tensor
    ) -> Sequence[list[tuple[int, float]]]:
        """Return the most probable tokens of each row, as many as any row needs."""
        n_top = max(0 if row.is_done else row.n_top for row in self._rows)
        if not n_top:
            return [[] for _ in self._rows]
        largest = logits_BV.topk(n_top)
        logprobs_BN = largest.values - sums_B[:, None]
        both = torch.stack((largest.indices.to(logprobs_BN), logprobs_BN), dim=-1).tolist()
        return [[(int(token), logprob) for token, logprob in row] for row in both]

    def _common_error(self) -> Exception:
        """Return the first error of all processes, or this process's own if it is not a
        `UserError`."""
        own = self._error
        text = None
        if own is not None:
            text = str(own) if isinstance(own, UserError) else in_words(own)
        errors = gather_objects(text, self._group) if self._group else [text]
        if own is None or isinstance(own, UserError):
            return UserError(next(filter(None, errors)))
        return own


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: AbstractSet[int] = frozenset(),
    on_token: Callable[[int, int], bool] | None = None,
    use_cache: bool = True,
    group: dist.ProcessGroup | None = None,
) -> list[Generation]:
    """Continue all `prompts`, token ids, in one batch, by at most `max_new_tokens` each; rows end
    independently. For models, further arguments and errors, see `Engine`. Raise `UserError` without
    prompts.

    Args:
        sampling: None: always the most probable token.
        on_token: called with the row number and the next token, in row order; return True to end
            the row.
    """
    if not prompts:
        raise UserError("the list of prompts is empty; pass at least one")
    sampling = sampling or Sampling()
    engine = Engine(model, sampling=sampling, stop_ids=stop_ids, use_cache=use_cache, group=group)
    texts = []
    for row, prompt in enumerate(prompts):
        key = f"{sampling.seed}/{row}"
        take = None if on_token is None else partial(on_token, row)
        texts.append(engine.generate(prompt, max_new_tokens=max_new_tokens, key=key, on_token=take))
    return engine._run_plain(texts)


def _close(texts: Sequence[Coroutine[Any, Any, Any]]) -> None:
    """Close all coroutines, even if the cleanup of one fails."""
    with ExitStack() as stack:
        for text in reversed(texts):
            stack.callback(text.close)


def _check(model: nn.Module, prompt: Sequence[int], max_new_tokens: int) -> None:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        raise UserError("prompts must be lists of token ids, such as [tokenizer.encode(text)]")
    if not prompt:
        raise UserError("each prompt must have at least one token; use BOS for an empty text")
    config = cast(Any, model).config
    if unknown := [token for token in prompt if not 0 <= token < config.vocab_size]:
        raise UserError(
            f"a prompt contains token {unknown[0]}, but the vocabulary ends at "
            f"{config.vocab_size - 1}"
        )
    require(max_new_tokens >= 0, "max_new_tokens", max_new_tokens, "0 or more")
    if len(prompt) + max_new_tokens > config.max_seq_len:
        raise UserError(
            f"a prompt of {len(prompt)} tokens plus max_new_tokens {max_new_tokens} exceeds the "
            f"model's context of {config.max_seq_len} tokens (max_seq_len); reduce either"
        )


def _reject_partial_model(model: nn.Module) -> None:
    # The last stage has the embedding too if it is tied, but not the first layer.
    lacks_layers = "0" not in getattr(model, "layers", "0")
    if lacks_layers or any(
        getattr(model, name, model) is None for name in ("tok_embeddings", "head")
    ):
        raise UserError(
            "a pipeline stage cannot generate text: it has only some of the model's layers"
        )
    hooks = (hook for module in model.modules() for hook in forward_pre_hooks(module))
    if any(getattr(hook, "__module__", None) == context_parallel.__name__ for hook in hooks):
        raise UserError(
            "a model under context parallelism cannot generate text: each rank has only some of "
            "the tokens"
        )


def _any_process(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Return which flags are true in any process of the group."""
    if group is None:
        return list(flags)
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend(group) == "nccl"
        else None
    )
    counts = torch.tensor([int(flag) for flag in flags], device=device)
    dist.all_reduce(counts, group=group)
    return [count > 0 for count in counts.tolist()]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode within the block; then restore its mode and free weights
    gathered by FSDP."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        free_gathered_weights(model)
        model.train(was_training)


def _left_padded(sequences: Sequence[Sequence[int]], multiple: int) -> tuple[Tensor, Tensor]:
    """Return tokens and positions (B, L) on the host, L divisible by `multiple`. Padding is
    documents of one token."""
    longest = -(-max(map(len, sequences)) // multiple) * multiple
    paddings = [longest - len(sequence) for sequence in sequences]
    tokens = [
        [_PADDING] * padding + list(sequence)
        for padding, sequence in zip(paddings, sequences, strict=True)
    ]
    return torch.tensor(tokens), (torch.arange(longest) - torch.tensor(paddings)[:, None]).clamp(
        min=0
    )


def _logits_at(
    model: nn.Module,
    index: int,
    tokens_BL: Tensor,
    attention: AttentionMetadata,
    images: ImageInputs | None = None,
) -> Tensor:
    """Return the logits (B, V) of the token in column `index`, after `images` if there are
    any."""

    def head(
        hidden_BLD: Tensor, weight_VD: Tensor | None, transform: LogitTransform = UNCHANGED
    ) -> Tensor:
        return whole_logits(whole(hidden_BLD)[:, index], weight_VD, transform)

    more = {} if images is None else {"images": images}
    logits: Tensor = model(tokens_BL, attention, head=head, **more)
    return logits


def _device_of(model: nn.Module) -> torch.device:
    """Return the compute device of the model, even if FSDP offloads the parameters."""
    parameter = next(model.parameters())
    return (
        torch.device(parameter.device_mesh.device_type)
        if is_dtensor(parameter)
        else parameter.device
    )

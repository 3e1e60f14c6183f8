"""The generation engine: coroutines await continuations, which the model in training computes in
one batch; and `generate`, for prompts that are known in advance."""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.components.generation.batch import Batch, BatchSettings
from torchtitan.components.generation.decode_graph import Shapes
from torchtitan.components.generation.experts import require_recordable
from torchtitan.components.generation.forward import device_of, reject_partial_model
from torchtitan.components.generation.next_tokens import LogprobsOf
from torchtitan.components.generation.plain_loop import Arrivals, PlainLoop, close_all
from torchtitan.components.generation.row import Generation, OnToken, ResultT, Row, TextCoroutine
from torchtitan.components.generation.sampling import RandomNumbers, Sampling
from torchtitan.components.generation.session import Session
from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.reader import ImageReader
from torchtitan.distributed.whole_tensors import sequence_splits
from torchtitan.tools.errors import UserError, require

_NOT_IN_RUN = (
    "`engine.generate` can be awaited only in coroutines that the same engine runs: "
    "engine.run([rollout(…), …]), or await asyncio.to_thread(engine.run, [rollout(…), …]) in an "
    "asyncio program"
)


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
        records_experts: set `Generation.experts`. Raises `UserError` for models without experts
            and classes of transformers.
        reader: reads the images of prompts, for a class of transformers that is not sharded by
            tensor parallelism. The tokens of images also end a text, since no model writes images.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sampling: Sampling,
        logprobs_of: LogprobsOf = "model",
        stop_ids: AbstractSet[int] = frozenset(),
        max_rows: int | None = None,
        use_cache: bool = True,
        group: dist.ProcessGroup | None = None,
        records_experts: bool = False,
        reader: ImageReader | None = None,
    ):
        reject_partial_model(model)
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
        if records_experts:
            require(use_cache, "use_cache", use_cache, "True to record experts")
            require_recordable(model)
        self._settings = BatchSettings(
            model=self._model,
            logprobs_of=logprobs_of,
            stop_ids=stop_ids if reader is None else stop_ids | reader.image_ids,
            max_rows=max_rows,
            use_cache=use_cache,
            group=group,
            reader=reader,
            degree=sequence_splits(self._model),
            records_experts=records_experts,
            device=device_of(model),
        )
        self._is_advancing = False  # whether code of a coroutine without a loop is running
        self._session: Session | None = None
        self._running_now = threading.Lock()
        self._shapes = Shapes()
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
        is_continued: bool = False,
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
            is_continued: whether a later prompt begins with this text: its cached tokens are kept.
                With windows or recurrent layers, texts with different numbers of new tokens
                continue in different steps. At most `max_rows` texts are kept, the newest, until
                they are continued or `run` ends: they may take as much memory as the batch.
        """
        session = self._session
        if session is not None and not session.is_here:
            session = None
        if session is None and not self._is_advancing:
            raise UserError(_NOT_IN_RUN)
        _check(self._model, prompt, max_new_tokens)
        if self._settings.reader:
            self._settings.reader.check(prompt, images)
        elif images:
            raise UserError("an engine without reader of images generates from text only")
        if sampling is not None:
            sampling.validate()
        require(0 <= n_top <= self._model.config.vocab_size, "n_top", n_top, "0 to the vocabulary")
        generation = into or Generation()
        if max_new_tokens == 0:
            return generation
        row = Row(
            tuple(prompt),
            max_new_tokens,
            RandomNumbers(key),
            on_token,
            sampling or self._sampling,
            n_top,
            generation,
            images,
            is_continued,
        )
        return await (row if session is None else session.text(row))

    @torch.no_grad()
    def serve(self, arrivals: Arrivals) -> None:
        """Run the coroutines that `arrivals` returns between two tokens, as `run` does, until it
        returns None, which closes those that have not ended; without new ones, it returns an empty
        list. Their results are dropped. Rows join and leave the batch at every token, and
        the cache grows with them. Recordings are kept for the next call, before which only values
        of weights may change. Raise the error of a coroutine, and `UserError` as `run` does, or if
        several processes share the model: the others do not know what arrives."""
        if self._settings.group is not None:
            raise UserError("Engine.serve needs a model in one process; set group to None")
        self._acquire()
        try:
            batch = Batch(self._settings, lambda: self.version, self._shapes)
            PlainLoop(batch, self._advancing).serve(arrivals)
        except BaseException:
            self._shapes.clear()  # of a state that is not known
            raise
        finally:
            self._running_now.release()

    def begin_session(self, session: Session) -> Batch:
        """Accept texts of a session, and return their batch. Raise `UserError` if the engine is
        already running."""
        self._acquire()
        self._session = session
        return self._new_batch()

    def leave_session(self) -> None:
        """Refuse further texts of the session."""
        self._session = None

    def end_session(self) -> None:
        """Allow other uses of the engine."""
        self._running_now.release()

    def _new_batch(self) -> Batch:
        return Batch(self._settings, lambda: self.version)

    def _acquire(self) -> None:
        if not self._running_now.acquire(blocking=False):
            raise UserError(
                "Engine.run is already running, and cannot be called in its coroutines or other "
                "threads"
            )

    def run(self, texts: Sequence[TextCoroutine[ResultT]]) -> list[ResultT]:
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
            close_all(texts)

    @torch.no_grad()
    def _run_plain(self, texts: Sequence[TextCoroutine[ResultT]]) -> list[ResultT]:
        """Return the results of coroutines that await `generate` and nothing else, without a loop
        of asyncio, so that one may run in this thread."""
        self._acquire()
        try:
            return PlainLoop(self._new_batch(), self._advancing).finish(texts)
        finally:
            try:
                close_all(texts)
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

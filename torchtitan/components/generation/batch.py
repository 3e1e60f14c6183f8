"""The batch of texts that a model continues, one token at a time."""

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.components.generation.decode_graph import DecodeGraph, Shape, Shapes, graphs_for
from torchtitan.components.generation.experts import ExpertRecorder, add_experts
from torchtitan.components.generation.forward import (
    NOT_FINITE_HINT,
    evaluating,
    left_padded,
    logits_at,
)
from torchtitan.components.generation.kept_texts import KeptTexts, Tokens
from torchtitan.components.generation.kv_cache import CachedAttention, KVCache
from torchtitan.components.generation.next_tokens import LogprobsOf, NextToken, next_tokens
from torchtitan.components.generation.row import PADDING, Generation, Row
from torchtitan.components.generation.sampling import RandomNumbers, Sampling
from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.reader import ImageReader
from torchtitan.distributed.process_group import gather_objects
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.images import ImageInputs
from torchtitan.tools.cpu_products import PassProducts
from torchtitan.tools.errors import UserError, in_words

_EXPERTS = "experts"  # what a cache stores of tokens
_MOST_EXTRA_SLOTS = 64
"""Slots before the longest text that its batch may have, until all texts are aligned again."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchSettings:
    """Settings of a batch; `Engine` describes most fields."""

    model: Any
    logprobs_of: LogprobsOf
    stop_ids: AbstractSet[int]
    max_rows: int | None
    use_cache: bool
    group: dist.ProcessGroup | None
    reader: ImageReader | None
    degree: int
    """Equal parts into which tensor parallelism splits a sequence."""
    device: torch.device
    records_experts: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Computed prompts from which waiting texts still start."""

    cache: KVCache
    row_of: dict[Tokens, int]
    logits_NV: Tensor
    n_reused: Sequence[int]
    """Tokens of each prompt that were not computed, since their keys and values were kept."""


class Needs(NamedTuple):
    """Tasks of a step that any process needs."""

    has_rows: bool
    has_tasks: bool
    """True if coroutines have not ended that may await something else."""
    decoding: bool
    prefilling: bool
    extending: bool
    """Computing prompts that begin with kept texts."""
    reading: bool
    """Reading images; processes share the weights of a vision tower for it."""
    has_failed: bool


class Batch:
    """Texts that wait for room, and texts that the model continues."""

    def __init__(
        self, settings: BatchSettings, version: Callable[[], int], shapes: Shapes | None = None
    ):
        """`version` returns the number of the weights. `shapes` keeps memory and recordings of
        earlier batches, between which only values of weights have changed."""
        model = settings.model
        self._settings = settings
        self._model = model
        self._degree = settings.degree
        self._device = settings.device
        self._version = version
        self.has_tasks = True
        """True if coroutines have not ended that may await something else."""
        self.n_drawn = 0
        """Tokens drawn so far."""
        self.growth: int | None = None
        """Slots that the cache reserves at a time; None: the slots of the longest text."""
        self._error: Exception | None = None
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []
        self._logits_BV: Tensor | None = None
        self._held: Prompts | None = None
        self._kept = KeptTexts(model, settings.max_rows, settings.degree)
        self._products = PassProducts(model)
        self._graph: DecodeGraph | None = None
        self._graphs = graphs_for(model, partial(logits_at, model, 0))
        self._shapes = shapes or Shapes()
        self._keeps_shapes = shapes is not None
        self._shape: Shape | None = None
        self._cache: Any = (
            model.generation_cache(lambda: KVCache(model, 0)) if settings.use_cache else None
        )
        self._recorder = ExpertRecorder(model) if settings.records_experts else None
        # Otherwise a new row needs a pass over all tokens of all rows.
        self._joins = type(self._cache) is KVCache

    @property
    def has_texts(self) -> bool:
        """True if a text of this process has not ended."""
        return any(not row.is_done for row in itertools.chain(self._rows, self._waiting))

    @property
    def is_alone(self) -> bool:
        """True if no other process computes with this one."""
        return self._settings.group is None

    @property
    def n_free(self) -> int:
        """Number of texts that could join now, in addition to the waiting texts."""
        return max(self._room(self._n_alive) - len(self._waiting), 0)

    def add(self, row: Row) -> None:
        """Queue a text, which joins as soon as there is room: before others if it begins with a
        kept one, which others may replace."""
        if self._kept.beginning_of(row.start):
            self._waiting.appendleft(row)
        else:
            self._waiting.append(row)

    def fail(self, error: Exception) -> None:
        """Raise an error in the next step, in all processes."""
        self._error = self._error or error

    def check(self) -> None:
        """Raise the error of `fail`, if there is one."""
        if self._error is not None:
            raise self._common_error()

    def pause(self) -> None:
        """Move the texts in the batch to the front of the queue. They continue with the weights of
        that time, which recompute their keys and values."""
        alive = [(place, row) for place, row in enumerate(self._rows) if not row.is_done]
        for place, row in reversed(alive):
            self._record(place, row)
            row.start = tuple(row.tokens)
            self._waiting.appendleft(row)
        self._rows = []

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Have the model in evaluation mode, and the cache in memory, within the block."""
        try:
            with (
                evaluating(self._model),
                self._products,
                self._cache or nullcontext(),
                self._recorder or nullcontext(),
            ):
                yield
        finally:
            # The memory is free for training, even if an error keeps this object.
            self._forget()

    def step(self) -> Needs:
        """Append a token to each row and let waiting texts join, if any process has some; return
        what the processes needed. Each process takes the same number of forward passes."""
        graph = self._graph  # it must not be destroyed before the step ends, which waits for it
        n_alive = self._n_alive
        chosen = self._choose(n_alive)
        self._decode_images(chosen)
        new, extended = self._new_prompts(chosen)
        images = self._read_images(chosen)
        own = Needs(
            has_rows=n_alive + len(chosen) > 0,
            has_tasks=self.has_tasks,
            decoding=n_alive > 0 or not self._joins,
            prefilling=bool(new),
            extending=bool(extended),
            reading=images is not None,
            has_failed=self._error is not None,
        )
        needs = Needs(*_any_process(own, self._settings.group))
        if needs.has_failed:
            raise self._common_error()
        if not (needs.has_rows and needs.has_tasks):
            self._waiting.extendleft(reversed(chosen))
            return needs
        if chosen and not self._joins:
            self._rows = [row for row in self._rows if not row.is_done] + chosen
        if needs.decoding:
            reader = self._settings.reader if needs.reading else None
            self._decode(bool(chosen) and not self._joins, images, reader)
        if self._joins:
            held = self._computed_prompts(new, extended, needs)
            self._join(chosen, held)
        self._sample()
        del graph
        return needs

    @property
    def _n_alive(self) -> int:
        return sum(not row.is_done for row in self._rows)

    @property
    def _known(self) -> Mapping[Tokens, int]:
        """Prompts that are computed already."""
        return self._held.row_of if self._held else {}

    def _room(self, n_alive: int) -> int:
        """Return the number of rows that the batch has room for."""
        most = self._settings.max_rows
        return sys.maxsize if most is None else most - n_alive

    def _choose(self, n_alive: int) -> list[Row]:
        """Take the waiting texts for which there is room."""
        n_free = self._room(n_alive)
        chosen: list[Row] = []
        while self._waiting and len(chosen) < n_free:
            row = self._waiting.popleft()
            if not row.is_done:  # nothing awaits it any more
                chosen.append(row)
        return self._of_one_pass(chosen) if self._joins else chosen

    def _of_one_pass(self, chosen: list[Row]) -> list[Row]:
        """Return the rows whose kept texts one pass can continue, and queue the others again."""
        prompts = [row.start for row in chosen if row.start not in self._known]
        others = self._kept.with_other_rests(prompts)
        self._waiting.extendleft(row for row in reversed(chosen) if row.start in others)
        return [row for row in chosen if row.start not in others]

    def _decode_images(self, chosen: Sequence[Row]) -> None:
        """Decode the images of rows, once for each prompt. The files may have changed."""
        decoded: dict[ImageFile, Any] = {}
        try:
            for row in chosen:
                for image in row.images:
                    if image not in decoded:
                        decoded[image] = image.decode()
                row.decoded = [decoded[image] for image in row.images]
        except Exception as error:  # of this process alone
            self.fail(error)

    def _read_images(self, chosen: Sequence[Row]) -> ImageInputs | None:
        """Return the images of the next forward pass if it computes prompts that may have some.
        What the processor refuses must be known before all processes begin the pass."""
        reader = self._settings.reader
        if reader is None or self._error is not None:
            return None
        boundaries = self._model.cache_boundaries()
        if not chosen and not any(row.n_tokens - 1 in boundaries for row in self._rows):
            return None
        rows = self._rows
        if chosen:
            rows = [row for row in rows if not row.is_done] + list(chosen)
        tokens_BL, _ = left_padded([row.tokens for row in rows], self._degree)
        try:
            return reader.inputs([[] if row.is_done else row.decoded for row in rows], tokens_BL)
        except Exception as error:  # of this process alone
            self.fail(error)
            return None

    def _new_prompts(self, chosen: Sequence[Row]) -> tuple[list[Tokens], dict[Tokens, Tokens]]:
        """Return the prompts that must be computed before the chosen rows join: prompts to
        compute as a whole, and prompts that begin with kept texts, with these texts."""
        new: list[Tokens] = []
        extended: dict[Tokens, Tokens] = {}
        if not self._joins:
            return new, extended
        for prompt in dict.fromkeys(row.start for row in chosen if row.start not in self._known):
            beginning = self._kept.beginning_of(prompt)
            if beginning is None:
                new.append(prompt)
            else:
                extended[prompt] = beginning
        return new, extended

    def _decode(
        self, is_new_batch: bool, images: ImageInputs | None, reader: ImageReader | None
    ) -> None:
        """Compute the logits of the next token of all rows.

        Args:
            is_new_batch: whether all prompts are computed.
            images: the images of the prompts, see `_read_images`.
            reader: given if any process reads images in this pass.
        """
        rows = self._rows
        cache = self._cache
        degree = self._degree
        if all(row.is_done for row in rows):
            self._pass_without_rows(reader)
            return
        boundaries = self._model.cache_boundaries()
        is_recomputed = boundaries and any(row.n_tokens - 1 in boundaries for row in rows)
        if cache is None or is_new_batch or is_recomputed:
            tokens_BL, positions_BL = left_padded([row.tokens for row in rows], degree)
            if cache is None:
                attention = AttentionMetadata.from_positions(positions_BL).to(self._device)
                self._logits_BV = self._logits_at(-1, tokens_BL, attention)
                return
            cache.clear()
            n_kept = tokens_BL.shape[1]
        else:
            # Tensor parallelism needs equally many tokens per rank: all after the first are
            # padding, and not kept.
            tokens_B = torch.tensor([row.last_token for row in rows])
            positions_B = torch.tensor([row.n_tokens - 1 for row in rows])
            tokens_BL = tokens_B[:, None].expand(-1, degree)
            positions_BL = positions_B[:, None].expand(-1, degree)
            n_kept = 1
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
        if isinstance(attention, CachedAttention):
            n_new = positions_BL.shape[1]
            places_L = torch.arange(cache.n_slots, cache.n_slots + n_new)
            if torch.equal(positions_BL, places_L.expand_as(positions_BL)):
                # no padding, so no mask for keys that are all new, or of a single token
                if not cache.n_slots:
                    attention = replace(attention, kernel="causal")
                elif n_new == 1:
                    attention = replace(attention, sees_all=True)
        logits_BV = self._logits_at(n_kept - 1, tokens_BL, attention, images)
        if self._degree > 1 and cache.states:
            raise UserError(
                f"a key/value cache under tensor parallelism (degree {self._degree}) supports no "
                "recurrent layers: padding tokens would change their states; generate without "
                "cache (use_cache=False)"
            )
        if self._recorder is not None:
            cache.store(_EXPERTS, self._recorder.take())
        cache.advance(n_kept)
        return logits_BV

    def _pass_without_rows(self, reader: ImageReader | None = None) -> None:
        """Take part in a forward pass of the other processes, which may read images."""
        tokens_BL = torch.full((1, self._degree), PADDING)
        images = reader.inputs([[]], tokens_BL).to(self._device) if reader else None
        attention = AttentionMetadata.of_rows(*tokens_BL.shape)
        self._logits_at(0, tokens_BL, attention, images)

    def _logits_at(
        self,
        index: int,
        tokens_BL: Tensor,
        attention: AttentionMetadata,
        images: ImageInputs | None = None,
    ) -> Tensor:
        """See `logits_at`; the tokens are on the host."""
        self._products.before(tokens_BL.numel(), len(tokens_BL))
        return logits_at(self._model, index, tokens_BL.to(self._device), attention, images)

    def _computed_prompts(
        self, new: list[Tokens], extended: dict[Tokens, Tokens], needs: Needs
    ) -> list[Prompts]:
        """Compute prompts, with the other processes, and return all that rows may start from."""
        held = [self._held] if self._held else []
        if new:
            self._held = self._compute_prompts(new)
            held.append(self._held)
        elif needs.prefilling:
            self._pass_without_rows()
        if extended:
            held.append(self._extend_texts(extended))
            self._kept.drop(extended.values())
        elif needs.extending:
            self._pass_without_rows()
        return held

    def _join(self, chosen: list[Row], held: Sequence[Prompts]) -> None:
        """Add the chosen rows to the batch, after their prompts: at the places of finished ones if
        possible. Finished rows leave it if room is needed, if they are the majority, or if no
        slot is left."""
        kept, cache = self._alive(), self._cache
        is_full = self.growth and cache.n_slots + self._degree > cache.max_slots
        if chosen and self._has_places(chosen, len(kept)):
            self._replace_finished(chosen, held)
        elif chosen or (kept and (is_full or 2 * len(kept) < len(self._rows))):
            self._assemble(kept, chosen, held)
        if self._held and not any(row.start in self._held.row_of for row in self._waiting):
            self._held = None

    def _compute_prompts(self, prompts: list[Tokens]) -> Prompts:
        tokens_BL, positions_BL = left_padded(prompts, self._degree)
        length = tokens_BL.shape[1]
        cache = KVCache(self._model, length + self._degree)
        logits_NV = self._cached_logits(cache, tokens_BL, positions_BL, length)
        places = {prompt: index for index, prompt in enumerate(prompts)}
        return Prompts(cache, places, logits_NV, n_reused=[0] * len(prompts))

    def _extend_texts(self, beginnings: dict[Tokens, Tokens]) -> Prompts:
        """Compute prompts from the kept texts that they begin with."""
        inputs = self._kept.continued(beginnings)
        logits_NV = self._cached_logits(
            inputs.cache, inputs.tokens_BL, inputs.positions_BL, inputs.n_kept
        )
        places = {prompt: index for index, prompt in enumerate(beginnings)}
        return Prompts(inputs.cache, places, logits_NV, n_reused=inputs.n_before)

    def _assemble(self, kept: list[int], chosen: Sequence[Row], held: Sequence[Prompts]) -> None:
        """Make a batch of the rows with the numbers `kept` and the chosen rows, whose prompts
        are `held`."""
        rows = [self._rows[index] for index in kept]
        sources = [(self._cache, kept)]
        logits = [] if self._logits_BV is None else [self._logits_BV[kept]]
        for prompts in held:
            joining, places = _start(chosen, prompts)
            sources.append((prompts.cache, places))
            logits.append(prompts.logits_NV[places])
            rows += joining
        is_static = all(cache.is_static for cache, places in sources if places)
        n_slots = max(row.n_tokens for row in rows)
        # Padding before the first token and, under tensor parallelism, after the last.
        self._cache.max_slots = n_slots + self._n_left(rows) + 2 * self._degree
        shape = None
        if self._graphs and self._graphs.keeps and is_static:
            n_rows = len(rows)
            if self.growth:  # few different numbers, so that recordings are used again
                n_rows = self._few_numbers(n_rows)
                self._cache.max_slots += -self._cache.max_slots % self.growth
            shape = self._shapes.shape(n_rows, self._cache.max_slots)
            n_missing = n_rows - len(rows)
            rows += n_missing * [_finished_row()]
            logits.append(logits[-1].new_zeros(n_missing, logits[-1].shape[1]))
        self._cache.assemble(sources, n_slots, shape.memory if shape else None)
        self._rows, self._logits_BV = rows, torch.cat(logits)
        if self._shape is not None and self._shape is not shape:
            self._shape.free()
        self._shape = shape
        self._graph = DecodeGraph(self._graphs, self._cache, shape) if self._graphs else None

    def _alive(self) -> list[int]:
        """Return the numbers of the rows that have not ended."""
        return [index for index, row in enumerate(self._rows) if not row.is_done]

    def _n_left(self, rows: Sequence[Row]) -> int:
        """Return the number of tokens to reserve slots for."""
        longest = max(row.max_new_tokens - len(row.generation.ids) for row in rows)
        return longest if self.growth is None else min(longest, self.growth)

    def _few_numbers(self, n_rows: int) -> int:
        """Return the next larger of few numbers of rows, within the limit: 1, 2, 4, 8, then at most
        a quarter more."""
        n_bits = (n_rows - 1).bit_length()
        step = 2 ** (n_bits if n_bits <= 3 else n_bits - 3)
        most = self._settings.max_rows or sys.maxsize
        return max(min(-(-n_rows // step) * step, most), n_rows)

    def _has_places(self, chosen: Sequence[Row], n_alive: int) -> bool:
        """Return whether rows can take the places of finished ones."""
        if self._shape is None or not n_alive or len(chosen) > len(self._rows) - n_alive:
            return False
        cache = self._cache
        longest = max(row.n_tokens for row in [*self._rows, *chosen])
        n_needed = cache.n_slots + (0 if self.growth else self._n_left(chosen))
        return (
            max(row.n_tokens for row in chosen) <= cache.n_slots <= longest + _MOST_EXTRA_SLOTS
            and n_needed + 2 * self._degree <= cache.max_slots
        )

    def _replace_finished(self, chosen: Sequence[Row], held: Sequence[Prompts]) -> None:
        """Put rows at the places of finished ones. The others, and what is recorded, stay."""
        assert self._logits_BV is not None
        free = [index for index, row in enumerate(self._rows) if row.is_done]
        for prompts in held:
            joining, sources = _start(chosen, prompts)
            if not joining:
                continue
            places, free = free[: len(joining)], free[len(joining) :]
            self._cache.replace_rows(places, prompts.cache, sources)
            self._logits_BV = self._logits_BV.index_copy(
                0, torch.tensor(places), prompts.logits_NV[sources]
            )
            for place, row in zip(places, joining, strict=True):
                self._rows[place] = row

    def _sample(self) -> None:
        """Draw a token for each row, and continue the coroutines of rows that end."""
        rows = self._rows
        if all(row.is_done for row in rows):
            return
        assert self._logits_BV is not None
        drawn = next_tokens(rows, self._logits_BV, logprobs_of=self._settings.logprobs_of)
        if not all(
            row.is_done or next_token.is_finite for row, next_token in zip(rows, drawn, strict=True)
        ):
            # The most probable token would silently be token 0.
            hint = f"the model's logits are not finite (NaN or infinite); {NOT_FINITE_HINT}"
            self.fail(UserError(hint))
            return
        for place, (row, next_token) in enumerate(zip(rows, drawn, strict=True)):
            if not row.is_done:
                self._append(place, row, next_token)

    def _append(self, place: int, row: Row, next_token: NextToken) -> None:
        """Append a token to a row, and pass the text on if it ends."""
        generation = row.generation
        if row.n_top:
            generation.top_logprobs.append(next_token.top[: row.n_top])
        generation.ids.append(next_token.token)
        generation.logprobs.append(next_token.logprob)
        generation.versions.append(self._version())
        self.n_drawn += 1
        stopped = next_token.token in self._settings.stop_ids
        if not stopped and row.on_token is not None:
            stopped = row.on_token(next_token.token)
        if stopped:
            generation.finish_reason = "stop"
        if stopped or len(generation.ids) == row.max_new_tokens:
            self._record(place, row)
            self._keep(place, row)
            row.is_done = True
            row.end(generation)

    def _record(self, place: int, row: Row) -> None:
        """Add the experts of a row's tokens to its continuation. Its last token has none yet."""
        if self._recorder is not None:
            experts = self._cache.stored(_EXPERTS, place, row.n_tokens - 1)
            add_experts(row.generation, experts.to("cpu", copy=True).numpy())

    def _keep(self, place: int, row: Row) -> None:
        """Keep the cached tokens of a text that a later prompt begins with. The last token of the
        text is not in the cache yet."""
        if row.is_continued and self._joins:
            self._kept.keep(tuple(row.tokens[:-1]), self._cache, place)

    def _forget(self) -> None:
        """Free the memory of a batch without rows."""
        self._graph = None
        self._shape = None
        self._shapes.free()
        if not self._keeps_shapes:
            self._shapes.clear()
        self._held = None
        self._kept.clear()
        self._logits_BV = None
        if self._cache is not None:
            self._cache.clear()

    def _common_error(self) -> Exception:
        """Return the first error of all processes, or this process's own if it is not a
        `UserError`."""
        own = self._error
        text = None
        if own is not None:
            text = str(own) if isinstance(own, UserError) else in_words(own)
        errors = gather_objects(text, self._settings.group) if self._settings.group else [text]
        if own is None or isinstance(own, UserError):
            return UserError(next(filter(None, errors)))
        return own


def _start(chosen: Sequence[Row], prompts: Prompts) -> tuple[list[Row], list[int]]:
    """Return the chosen rows that start from some prompts, and the places of their prompts."""
    joining = [row for row in chosen if row.start in prompts.row_of]
    places = [prompts.row_of[row.start] for row in joining]
    for row, place in zip(joining, places, strict=True):
        row.generation.n_reused += prompts.n_reused[place]
    return joining, places


def _finished_row() -> Row:
    """Return a row of padding."""
    row = Row((PADDING,), 0, RandomNumbers(""), None, Sampling(), 0, Generation())
    row.is_done = True
    return row


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

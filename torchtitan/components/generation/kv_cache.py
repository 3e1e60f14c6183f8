"""A key/value cache of any model for incremental decoding; rows may join and leave."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.eager import uncompiled
from torchtitan.tools.torch_private import tree_map

_ATTENTION = "*.attend"
"""Pattern of the modules `attend(queries, keys, values, attention)` in all families
(`ShardingPlan.attention`)."""

_CACHE_LINE = 64  # bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedAttention(AttentionMetadata):
    """Attention of new tokens to the cached ones and to each other."""

    cache: "KVCache"

    is_static: bool = False
    """True if the keys are followed by unused ones, and a tensor says at which of them the new
    token is."""

    def document_lengths_BL(self, device: torch.device) -> Tensor:
        """Return the length of each row's text up to its last new token, (B, 1)."""
        assert self.positions_BL is not None
        return self.positions_BL[:, -1:].to(device) + 1

    def with_window(self, window: int | None) -> AttentionMetadata:
        """Describe the same tokens for layers with this window, which keep only the keys that new
        tokens see."""
        assert self.query_places_L is not None and self.key_places_S is not None
        n_keys = len(self.key_places_S) if window is None else window - 1 + len(self.query_places_L)
        return replace(self, window=window, key_places_S=self.key_places_S[-n_keys:])


class KVCache:
    """Key/value cache of a model, active within a `with` block.

    Each forward pass receives the new tokens that follow the cached ones, and `attention` of their
    positions. Call `advance` after it with the number of tokens to keep. Hooks on the model's
    attention store new keys and values, and pass all cached keys and values that the layer's window
    reaches. Padding before a row's first token has position 0, so that it sees only itself (a
    softmax over nothing would be NaN).

    `model` may be sharded by tensor parallelism or FSDP; `max_slots` is the capacity in tokens per
    row, including padding. Raises `ValueError` if the model has no such attention.
    """

    def __init__(self, model: nn.Module, max_slots: int):
        self.max_slots, self.n_slots = max_slots, 0
        self.states: dict[nn.Module, Any] = {}
        """States of recurrent modules after all tokens of the last forward pass."""
        self._modules = [
            module for name, module in model.named_modules() if fnmatchcase(name, _ATTENTION)
        ]
        if not self._modules:
            raise ValueError(
                f"{type(model).__name__} has no modules named {_ATTENTION}, whose keys could be "
                "cached"
            )
        self._stored: dict[Any, Any] = {}
        """First slot of a layer's keys and values, and both from there: all in full layers. The
        same for tensors that `store` keeps."""
        self._has_windows = False
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        # Compiled blocks were traced without the hooks.
        self._cleanup.enter_context(uncompiled())
        for module in self._modules:
            self._cleanup.callback(module.register_forward_pre_hook(self._attend_to_cached).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self.n_slots = 0
        self._stored.clear()
        self.states.clear()

    def attention(self, positions_BL: Tensor) -> AttentionMetadata:
        """Return the attention of the next forward pass: new tokens see all cached tokens of their
        row's text."""
        end = self.n_slots + positions_BL.shape[1]
        assert end <= self.max_slots, f"{end} tokens in a cache for {self.max_slots}"
        slots_S = torch.arange(end, device=positions_BL.device)
        return self._attention(positions_BL, slots_S[self.n_slots :], slots_S)

    @property
    def is_static(self) -> bool:
        """True if `static_attention` is possible: no states, and all layers keep all tokens, in
        memory that the first step after `assemble` allocates for `max_slots`."""
        return not (self.states or self._has_windows) and all(
            keys.shape[1] == self.max_slots for _, keys, *_ in self._stored.values()
        )

    def memory(self) -> list[Tensor]:
        """Return the tensors that hold keys and values."""
        return [x for _, *tensors in self._stored.values() for x in tensors]

    def static_attention(
        self, positions_B1: Tensor, slot_1: Tensor, n_keys: int
    ) -> AttentionMetadata:
        """Return the attention of one token per row, stored in the slot `slot_1`, (1,), to the
        first `n_keys` slots. Later slots are masked, so that operations and shapes are the same at
        each slot."""
        attention = self._attention(
            positions_B1, slot_1, torch.arange(n_keys, device=slot_1.device)
        )
        return replace(attention, is_static=True)

    def _attention(
        self, positions_BL: Tensor, new_slots_L: Tensor, slots_S: Tensor
    ) -> CachedAttention:
        rows = AttentionMetadata.of_rows(*positions_BL.shape)
        return CachedAttention(
            cache=self,
            positions_BL=positions_BL,
            cu_seqlens=rows.cu_seqlens,
            max_seqlen=rows.max_seqlen,
            query_places_L=new_slots_L,
            key_places_S=slots_S,
            kernel="dense",  # a mask, since FlexAttention would compile for each number of keys
            states=self.states,
        )

    def advance(self, length: int) -> None:
        """Keep the first `length` tokens of the last forward pass; the other slots are reused."""
        self.n_slots += length

    def can_go_back(self, n_tokens: int) -> bool:
        """Return whether any of the last `n_tokens` can be recomputed: the model has no recurrent
        states, and all layers keep these tokens. Otherwise, only later tokens can be computed."""
        return not self.states and all(
            self.n_slots - first >= n_tokens for first, *_ in self._stored.values()
        )

    def row(self, row: int, n_tokens: int) -> "KVCache":
        """Return a copy of the last `n_tokens` of a row, as far as its windows reach, with its
        states."""
        one = copy.copy(self)
        one.states = {}
        one.max_slots = n_tokens
        one.assemble([(self, [row])], n_tokens)
        return one

    def beginning(self, n_slots: int) -> "KVCache":
        """Return the first slots, in the same memory."""
        view = copy.copy(self)
        view.n_slots = n_slots
        return view

    def assemble(
        self,
        sources: "Sequence[tuple[KVCache, list[int]]]",
        n_slots: int,
        memory: "SlotMemory | None" = None,
    ) -> None:
        """Replace the content by rows of caches of the same model, which may include this one,
        aligned at their last tokens. `n_slots` is the number of tokens to keep, at least the length
        of the longest row. Given `memory` of `max_slots` slots, keep the rows in its first ones;
        all sources must be static."""
        used = [(cache, torch.tensor(rows)) for cache, rows in sources if rows]
        self._has_windows = any(cache._has_windows for cache, _ in used)
        stored, states = {}, {}
        for module in used[0][0]._stored:
            layers = [
                (cache._stored[module], cache.n_slots - cache._stored[module][0], rows)
                for cache, rows in used
            ]
            width = min(n_slots, max(n_valid for _, n_valid, _ in layers))
            width = n_slots if memory else width
            # of one kind, such as keys, in all caches
            kinds = zip(*(tensors for (_, *tensors), _, _ in layers), strict=True)
            tensors = []
            for number, kind in enumerate(kinds):
                parts = [
                    _last(tensor, rows, n_valid, width)
                    for tensor, (_, n_valid, rows) in zip(kind, layers, strict=True)
                ]
                x_BSKD = torch.cat(parts)
                tensors.append(memory.put((module, number), x_BSKD) if memory else x_BSKD)
            stored[module] = n_slots - width, *tensors
        for module in used[0][0].states:
            parts = [
                tree_map(lambda x, rows=rows: x[rows.to(x.device)], cache.states[module])
                for cache, rows in used
            ]
            states[module] = tree_map(lambda *xs: torch.cat(xs), *parts)
        self.n_slots, self._stored = n_slots, stored
        self.states.clear()
        self.states.update(states)

    def replace_rows(self, places: list[int], source: "KVCache", rows: list[int]) -> None:
        """Write rows of another static cache, which have no more tokens than are kept here, to some
        places of this one, which is static."""
        places_B, rows_B = torch.tensor(places), torch.tensor(rows)
        for module, (_, *tensors) in self._stored.items():
            _, *others = source._stored[module]
            for memory, other in zip(tensors, others, strict=True):
                x_BSKD = _last(other, rows_B, source.n_slots, self.n_slots)
                memory[:, : self.n_slots].index_copy_(0, places_B.to(memory.device), x_BSKD)

    def store(self, name: str, values_BLHD: Tensor) -> None:
        """Keep further values of the tokens of the last forward pass, before `advance`, with the
        keys of their rows."""
        self._remember(
            name, [values_BLHD], slice(self.n_slots, self.n_slots + values_BLHD.shape[1])
        )

    def stored(self, name: str, row: int, n_tokens: int) -> Tensor:
        """Return the values of `store` for the last `n_tokens` of a row."""
        first, values_BLHD = self._stored[name]
        end = self.n_slots - first
        return values_BLHD[row, end - n_tokens : end]

    @staticmethod
    def _attend_to_cached(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        q_BLHD, *new, attention = args
        if not isinstance(attention, CachedAttention):
            return args
        return q_BLHD, *attention.cache._store(module, new, attention), attention

    def _store(
        self, module: nn.Module, new: Sequence[Tensor], attention: CachedAttention
    ) -> list[Tensor]:
        """Store new keys and values of a layer; return all that its window reaches."""
        assert attention.query_places_L is not None and attention.key_places_S is not None
        end = self.n_slots + new[0].shape[1]
        if attention.window is not None:
            self._has_windows = True
            stored_first, *stored = self._stored_or_none(module, new)
            first = end - len(attention.key_places_S)
            kept = slice(first - stored_first, self.n_slots - stored_first)
            stored = [
                torch.cat((old[:, kept], x), dim=1) for old, x in zip(stored, new, strict=True)
            ]
            self._stored[module] = first, *stored
            return stored
        slots = attention.query_places_L if attention.is_static else slice(self.n_slots, end)
        stored = self._remember(module, new, slots)
        return [memory[:, : len(attention.key_places_S)] for memory in stored]

    def _remember(self, key: Any, new: Sequence[Tensor], slots: Any) -> list[Tensor]:
        """Write new values of all rows to their slots; return the memory."""
        end = self.n_slots + new[0].shape[1]
        _, *stored = self._stored_or_none(key, new)
        if stored[0].shape[1] < end:
            # Zeros, since a masked key of NaN would poison the sum.
            grown = [_zeros(x, self.max_slots) for x in new]
            for memory, old in zip(grown, stored, strict=True):
                memory[:, : self.n_slots] = old[:, : self.n_slots]
            self._stored[key] = 0, *grown
            stored = grown
        for memory, x in zip(stored, new, strict=True):
            if isinstance(slots, Tensor):
                memory.index_copy_(1, slots, x)
            else:
                memory[:, slots] = x
        return stored

    def _stored_or_none(self, key: Any, new: Sequence[Tensor]) -> Any:
        """Return the first slot and the values that are stored, none if nothing is yet."""
        return self._stored[key] if key in self._stored else (0, *(x[:, :0] for x in new))


class SlotMemory:
    """Memory of a static cache, `n_slots` slots of `n_rows` rows: the same tensors each time, so
    that recordings which read them stay valid. `free` gives the memory back until the next use."""

    def __init__(self, n_rows: int, n_slots: int):
        self.n_rows, self.n_slots = n_rows, n_slots
        self._tensors: dict[Any, Tensor] = {}

    def put(self, key: Any, x_BSKD: Tensor) -> Tensor:
        """Return the tensor of a key, which begins with the values of `x_BSKD`. Other slots are 0,
        since a masked key of NaN would poison the sum."""
        n_rows, n_slots = x_BSKD.shape[:2]
        memory = self._tensors.get(key)
        if memory is None or memory.shape[2:] != x_BSKD.shape[2:] or memory.dtype != x_BSKD.dtype:
            every_row_BSKD = x_BSKD[:1].expand(self.n_rows, -1, -1, -1)
            memory = self._tensors[key] = _zeros(every_row_BSKD, self.n_slots)
        elif not memory.untyped_storage().nbytes():
            memory.untyped_storage().resize_(memory.numel() * memory.element_size())
        memory[:n_rows, n_slots:] = 0
        memory[n_rows:] = 0
        memory[:n_rows, :n_slots] = x_BSKD
        return memory

    def free(self) -> None:
        """Give the memory back. Nothing may read it until its next use."""
        for memory in self._tensors.values():
            memory.untyped_storage().resize_(0)


def _zeros(x_BLKD: Tensor, n_slots: int) -> Tensor:
    """Return zeros (B, n_slots, K, D). In memory, the slots of a head are next to each other, which
    its scores read; or the heads of a slot if they are so narrow that all of them take at most
    two cache lines, since memory is read by lines."""
    n_rows, _, n_heads, width = x_BLKD.shape
    n_bytes = n_heads * width * x_BLKD.element_size()
    if x_BLKD.device.type == "cpu" and n_bytes <= 2 * _CACHE_LINE:
        return x_BLKD.new_zeros(n_rows, n_slots, n_heads, width)
    return x_BLKD.new_zeros(n_rows, n_heads, n_slots, width).transpose(1, 2)


def _last(x_BSKD: Tensor, rows: Tensor, n_valid: int, width: int) -> Tensor:
    """Return the last `width` of the first `n_valid` slots of some rows, after zeros if there are
    fewer (a masked key of NaN would poison the sum)."""
    kept = min(n_valid, width)
    part = x_BSKD[:, n_valid - kept : n_valid].index_select(0, rows.to(x_BSKD.device))
    return F.pad(part, (0, 0, 0, 0, width - kept, 0))

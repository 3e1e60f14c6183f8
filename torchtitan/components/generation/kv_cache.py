"""Keys and values of the tokens seen so far, so that each further token costs one forward pass of itself alone."""

from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

_ATTENTION = "*.attend"
"""The modules `attend(queries, keys, values, mask)`, which every family has (`ShardingPlan.attention`)."""


class KVCache:
    """While it is entered, the model's attention reaches back to all tokens of the forward passes so far.

    Each pass is given the tokens that are new, with their positions, as `model(tokens_BL, positions_BL, packed=False)`.
    Between passes, `advance` says how many of them are kept. Nothing in the model changes: hooks on its attention
    store keys and values, and hand on all of them with the mask that belongs to them; they are gone at the end.

    Tokens are told by their slots, the places in the cache: a row may have padding anywhere, which nothing attends to
    but itself (a softmax over nothing would be NaN, and NaN times zero is NaN).

    Args:
        model: whole, or a rank's part of it under tensor parallelism or FSDP.
        max_slots: how many tokens per row it has room for, padding included.

    Raises:
        ValueError: if the model has no attention of that kind.
    """

    def __init__(self, model: nn.Module, max_slots: int):
        self.max_slots = max_slots
        self.n_slots = 0
        """Slots in use."""
        self._modules = [module for name, module in model.named_modules() if fnmatchcase(name, _ATTENTION)]
        if not self._modules:
            raise ValueError(f"{type(model).__name__} has no modules named {_ATTENTION}, whose keys could be cached")
        self._real_BS = torch.empty(0)
        self._mask = torch.empty(0)
        self._stored: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._cleanup = ExitStack()

    def __enter__(self) -> "KVCache":
        # A compiled block was traced without the hooks, and would go on without them.
        self._cleanup.enter_context(torch.compiler.set_stance("force_eager"))
        for module in self._modules:
            self._cleanup.callback(module.register_forward_pre_hook(self._attend_to_all).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()
        self._stored.clear()

    def expect(self, real_BL: Tensor) -> None:
        """Say which of the tokens of the next forward pass are text, and not padding: boolean, shape (B, L)."""
        batch, length = real_BL.shape
        end = self.n_slots + length
        assert end <= self.max_slots, f"{end} tokens in a cache for {self.max_slots}"
        if self.n_slots == 0:
            self._real_BS = real_BL.new_zeros(batch, self.max_slots)
        self._real_BS[:, self.n_slots : end] = real_BL
        slots_S = torch.arange(end, device=real_BL.device)
        queries_L1 = slots_S[self.n_slots :, None]
        seen_BLS = self._real_BS[:, None, :end] & (slots_S <= queries_L1)
        self._mask = (seen_BLS | (slots_S == queries_L1))[:, None]

    def advance(self, length: int) -> None:
        """Keep the first `length` tokens of the last forward pass; the slots of the others are used again."""
        self.n_slots += length

    def _attend_to_all(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        q_BLHD, k_BLKD, v_BLKD, _ = args
        if module not in self._stored:
            batch, _, heads, _ = k_BLKD.shape
            new = [x.new_empty(batch, self.max_slots, heads, x.shape[-1]) for x in (k_BLKD, v_BLKD)]
            self._stored[module] = (new[0], new[1])
        end = self.n_slots + k_BLKD.shape[1]
        for stored, x in zip(self._stored[module], (k_BLKD, v_BLKD), strict=True):
            stored[:, self.n_slots : end] = x
        keys, values = self._stored[module]
        return q_BLHD, keys[:, :end], values[:, :end], self._mask

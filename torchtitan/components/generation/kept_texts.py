"""Finished texts that later prompts begin with, such as the earlier turns of a conversation."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.components.generation.forward import left_padded
from torchtitan.components.generation.kv_cache import KVCache
from torchtitan.components.generation.row import PADDING
from torchtitan.protocols.model import BaseModel

Tokens = tuple[int, ...]


class Continued(NamedTuple):
    """Inputs of a forward pass that continues kept texts."""

    cache: KVCache
    """A row for each prompt: its kept tokens that the pass does not recompute."""
    tokens_BL: Tensor
    positions_BL: Tensor
    n_kept: int
    """Columns of the pass before the padding."""
    n_before: list[int]
    """Tokens of each prompt that are not computed."""


class KeptTexts:
    """Keys, values and states of texts, each in a key/value cache of one row.

    Args:
        most: number of texts that are kept, the newest; None: all.
        degree: equal parts into which tensor parallelism splits the sequences of a pass.
    """

    def __init__(self, model: BaseModel, most: int | None, degree: int):
        self._model = model
        self._most = most
        self._degree = degree
        self._caches: dict[Tokens, KVCache] = {}

    def keep(self, tokens: Tokens, cache: KVCache, row: int) -> None:
        """Keep a text, which a row of a cache ends with, and drop the oldest if there are too
        many."""
        self._caches.pop(tokens, None)  # a text that is kept again is the newest
        self._caches[tokens] = cache.row(row, len(tokens))
        if self._most is not None and len(self._caches) > self._most:
            del self._caches[next(iter(self._caches))]

    def beginning_of(self, prompt: Tokens) -> Tokens | None:
        """Return the longest kept text that a prompt continues, if it is at least half of it:
        computing all of a prompt costs less than twice as much as the rest. None if its keys do not
        belong to the longer text."""
        lengths = sorted({len(tokens) for tokens in self._caches}, reverse=True)
        for length in lengths:
            if length < len(prompt) <= 2 * length and prompt[:length] in self._caches:
                boundaries = self._model.cache_boundaries()
                is_valid = not any(length <= boundary < len(prompt) for boundary in boundaries)
                return prompt[:length] if is_valid else None
        return None

    def with_other_rests(self, prompts: Sequence[Tokens]) -> set[Tokens]:
        """Return the prompts whose kept texts must wait for another pass. Without caches that can
        all go back, the rows of a pass have equally many new tokens. The newest prompts are the
        first, so the pass has the number of the last one."""
        texts = {prompt: self.beginning_of(prompt) for prompt in prompts}
        n_new = {prompt: len(prompt) - len(text) for prompt, text in texts.items() if text}
        if all(self._caches[text].can_go_back(len(text)) for text in texts.values() if text):
            return set()
        *_, taken = n_new.values()
        return {prompt for prompt, number in n_new.items() if number != taken}

    def continued(self, beginnings: Mapping[Tokens, Tokens]) -> Continued:
        """Return the inputs of a pass that computes prompts, each from the kept text that it begins
        with. All rows have equally many tokens: a row with fewer new ones, which can go back,
        recomputes its last kept ones. Rows that cannot have equally many, and padding after them
        if tensor parallelism needs more."""
        prompts = list(beginnings)
        n_new = max(len(prompt) - len(kept) for prompt, kept in beginnings.items())
        n_columns = -(-n_new // self._degree) * self._degree
        if all(self._caches[kept].can_go_back(len(kept)) for kept in beginnings.values()):
            n_new = n_columns
        n_before = [max(len(prompt) - n_new, 0) for prompt in prompts]
        sources = [
            (self._caches[beginnings[prompt]].beginning(n_kept), [0])
            for prompt, n_kept in zip(prompts, n_before, strict=True)
        ]
        n_slots = max(n_before)
        cache = KVCache(self._model, n_slots + n_columns + self._degree)
        cache.assemble(sources, n_slots)
        tokens_BL, positions_BL = left_padded([prompt[-n_new:] for prompt in prompts], 1)
        positions_BL += torch.tensor(n_before)[:, None]
        n_after = n_columns - n_new
        tokens_BL = F.pad(tokens_BL, (0, n_after), value=PADDING)
        positions_BL = torch.cat((positions_BL, positions_BL[:, -1:].expand(-1, n_after)), dim=1)
        return Continued(cache, tokens_BL, positions_BL, n_new, n_before)

    def drop(self, texts: Iterable[Tokens]) -> None:
        """Free the memory of texts that have been continued."""
        for tokens in texts:
            self._caches.pop(tokens, None)

    def clear(self) -> None:
        """Free all memory."""
        self._caches.clear()

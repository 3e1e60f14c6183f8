"""Finished texts that later prompts begin with, such as the earlier turns of a conversation."""

from collections.abc import Iterable

from torchtitan.components.generation.kv_cache import KVCache

Tokens = tuple[int, ...]


class KeptTexts:
    """The keys and values of at most `most` texts (None: all), each in a cache of one row."""

    def __init__(self, most: int | None):
        self._most = most
        self._caches: dict[Tokens, KVCache] = {}

    def keep(self, tokens: Tokens, cache: KVCache) -> None:
        """Keep a text, and drop the oldest if there are too many."""
        self._caches.pop(tokens, None)  # a text that is kept again is the newest
        self._caches[tokens] = cache
        if self._most is not None and len(self._caches) > self._most:
            del self._caches[next(iter(self._caches))]

    def beginning_of(self, prompt: Tokens) -> Tokens | None:
        """Return the longest kept text that a prompt continues, if it is at least half of it:
        computing all of a prompt costs less than twice as much as the rest."""
        lengths = sorted({len(tokens) for tokens in self._caches}, reverse=True)
        for length in lengths:
            if length < len(prompt) <= 2 * length and prompt[:length] in self._caches:
                return prompt[:length]
        return None

    def cache_of(self, tokens: Tokens) -> KVCache:
        """Return the keys and values of a kept text."""
        return self._caches[tokens]

    def drop(self, texts: Iterable[Tokens]) -> None:
        """Free the memory of texts that have been continued."""
        for tokens in texts:
            self._caches.pop(tokens, None)

    def clear(self) -> None:
        """Free all memory."""
        self._caches.clear()

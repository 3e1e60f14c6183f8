"""`Tokens`: which tokens of a text belong to some of its characters."""

from torchtitan.components.tokenizer import TokenSpans


class Tokens:
    """Tokens of a text, with their spans in characters, in order."""

    def __init__(self, text: str, spans: TokenSpans, special_ids: frozenset[int]):
        self._text = text
        self._special_ids = special_ids
        self.ids, self._starts, self._ends = spans

    def start(self, token: int) -> int:
        """Return the first character of a token."""
        return int(self._starts[token])

    def bounds(self, character: int) -> int | None:
        """Return the number of tokens before a character; None if a token has characters on both
        sides. A special token may absorb the whitespace after it."""
        n = self._n_before(character)
        end = self._ends[n - 1] if n else 0
        if end > character and (
            int(self.ids[n - 1]) not in self._special_ids or self._text[character:end].strip()
        ):
            return None
        return n

    def touched(self, start: int, end: int) -> slice:
        """Return the tokens with a character in [start, end). Excludes a token that begins before
        `start` and absorbs the whitespace after it."""
        first, last = self._n_before(start), self._n_before(end)
        while (
            first
            and self._ends[first - 1] > start
            and self._text[start : self._ends[first - 1]].strip()
        ):
            first -= 1
        return slice(first, last)

    def _n_before(self, character: int) -> int:
        """Return the number of tokens that begin before a character."""
        return int(self._starts.searchsorted(character))

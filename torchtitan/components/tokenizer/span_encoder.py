"""Token ids of rendered conversations with the characters of each token, by the library gigatoken
if its ids equal the tokenizer's."""

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torchtitan.components.tokenizer.array_encoder import ArrayEncoder, TokenArrays
from torchtitan.components.tokenizer.interface import Offsets, Tokenizer
from torchtitan.components.tokenizer.pretrained import PretrainedTokenizer
from torchtitan.components.tokenizer.probes import probe_texts

Array = np.ndarray

_LONGEST_TOGETHER = 1 << 22
"""Bytes of texts whose tokens are compared together, which needs a few times their memory."""


class TokenSpans(NamedTuple):
    """Tokens of a text. Tokens that share a character include all of it."""

    ids: Array
    """Token ids, int64 (n,)."""
    starts: Array
    """First character of each token, int64 (n,)."""
    ends: Array
    """End of each token's characters, int64 (n,)."""

    @classmethod
    def of(cls, ids: Sequence[int], offsets: Offsets) -> "TokenSpans":
        pairs = np.array(offsets, np.int64).reshape(-1, 2)
        return cls(np.array(ids, np.int64), pairs[:, 0], pairs[:, 1])


class SpanEncoder:
    """Encodes texts with special tokens like `Tokenizer.tokenize_with_offsets`, but faster if the
    tokens of the tokenizer are pieces of a text's bytes: `ArrayEncoder` then gives the ids, and the
    lengths of the tokens their characters. Texts with a token of other bytes, such as after a
    change by a normalizer, and all texts for other tokenizers, are encoded by the tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    @cached_property
    def arrays(self) -> ArrayEncoder:
        """Encoder of texts whose tokens are pieces of their bytes; closed for other tokenizers."""
        arrays = ArrayEncoder(self._tokenizer, allow_special=True)
        if self._pieces is None:
            arrays.close()
        return arrays

    def encode(self, texts: Sequence[str]) -> list[TokenSpans]:
        """Return the tokens of each text. Raise `DifferentIds` if the caller must encode all texts
        again, see `ArrayEncoder`, and `UserError` if the tokenizer does not support offsets."""
        if self._pieces is None or not texts:
            return self._by_tokenizer(texts)
        results = self._pieces.of_texts(texts, self.arrays.encode(texts))
        others = [number for number, spans in enumerate(results) if spans is None]
        again = self._by_tokenizer([texts[number] for number in others])
        for number, spans in zip(others, again, strict=True):
            results[number] = spans
        return [spans for spans in results if spans is not None]

    def _by_tokenizer(self, texts: Sequence[str]) -> list[TokenSpans]:
        if not texts:
            return []
        batch = self._tokenizer.tokenize_with_offsets(texts, allow_special=True)
        return [TokenSpans.of(ids, offsets) for ids, offsets in batch]

    @cached_property
    def _pieces(self) -> "_Pieces | None":
        kind, tokenizer = type(self._tokenizer), self._tokenizer
        if kind.tokenize_with_offsets is not PretrainedTokenizer.tokenize_with_offsets:
            return None
        backend = tokenizer.backend if isinstance(tokenizer, PretrainedTokenizer) else None
        table = backend.token_bytes() if backend else None
        if backend is None or table is None:
            return None
        pieces = _Pieces(table)
        texts = probe_texts([*backend.added_tokens()], [])
        known = self._by_tokenizer(texts)
        if pieces.spans(texts[0], known[0].ids) is None:  # nor would they be in most other texts
            return None
        for text, spans in zip(texts, known, strict=True):
            found = pieces.spans(text, spans.ids)
            if found and not all(map(np.array_equal, found, spans)):
                return None
        return pieces


class _Pieces:
    """Spans of tokens that are pieces of a text's bytes."""

    def __init__(self, table: list[bytes]):
        self._table = table
        self._sizes = np.fromiter(map(len, table), np.int64, len(table))
        self._bytes = np.frombuffer(b"".join(table), np.uint8)
        self._firsts = self._sizes.cumsum() - self._sizes  # places in `_bytes`

    def of_texts(self, texts: Sequence[str], found: TokenArrays) -> list[TokenSpans | None]:
        """Return `spans` of each text, of all together unless they are long."""
        try:
            contents = [text.encode() for text in texts]
        except UnicodeEncodeError:
            contents = []
        content = b"".join(contents)
        ids = found.ids.astype(np.int64)
        sizes = self._sizes[ids]
        ends = sizes.cumsum()
        last_N = found.lengths.cumsum()
        bytes_N = np.fromiter(map(len, contents), np.int64, len(contents)).cumsum()
        if (
            len(content) > _LONGEST_TOGETHER
            or len(bytes_N) != len(last_N)
            or not found.lengths.all()
            or not np.array_equal(ends[last_N - 1], bytes_N)
        ):
            pairs = zip(texts, found.of_texts(), strict=True)
            return [self.spans(text, ids.astype(np.int64)) for text, ids in pairs]
        starts = ends - sizes
        places = np.arange(len(content)) + (self._firsts[ids] - starts).repeat(sizes)
        values = np.frombuffer(content, np.uint8)
        wrong = np.flatnonzero(self._bytes[places] != values)
        others = {*bytes_N.searchsorted(wrong, side="right").tolist()}
        characters_N = np.fromiter(map(len, texts), np.int64, len(texts))
        if characters_N.sum() != len(content):
            starts, ends = _in_characters(values, starts, ends)
        before = (characters_N.cumsum() - characters_N).repeat(found.lengths)
        arrays = (ids, starts - before, ends - before)
        bounds = itertools.pairwise([0, *last_N.tolist()])
        return [
            None if number in others else TokenSpans(*(array[start:end] for array in arrays))
            for number, (start, end) in enumerate(bounds)
        ]

    def spans(self, text: str, ids: Array) -> TokenSpans | None:
        """Return the tokens of a text; None if the bytes of the tokens differ from the
        text."""
        try:
            content = text.encode()
        except UnicodeEncodeError:
            return None
        sizes = self._sizes[ids]
        ends = np.cumsum(sizes)
        if not len(ids) or b"".join(map(self._table.__getitem__, ids.tolist())) != content:
            return None
        starts = ends - sizes
        if len(content) == len(text):  # ASCII
            return TokenSpans(ids, starts, ends)
        return TokenSpans(ids, *_in_characters(np.frombuffer(content, np.uint8), starts, ends))


def _in_characters(content: Array, starts: Array, ends: Array) -> tuple[Array, Array]:
    """Convert places in UTF-8 to characters. Tokens that share a character include all of it."""
    characters = np.cumsum((content & 0xC0) != 0x80) - 1
    return characters[starts], characters[ends - 1] + 1

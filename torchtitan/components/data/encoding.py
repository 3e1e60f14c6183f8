"""Documents to token ids, in batches that keep all of the tokenizer's threads busy and memory bounded."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchtitan.components.data.readers import Document
from torchtitan.components.tokenizer import Tokenizer

PIECE_SIZE = 1 << 18
"""Characters after which a long document is cut, where that does not change its tokens."""
BATCH_SIZE = 1 << 23
"""Characters encoded at a time, at most about."""
BATCH_TEXTS = 1 << 15
"""Texts encoded at a time."""


class Piece(NamedTuple):
    """The token ids of a piece of a document, wrapped as the tokenizer asks."""

    ids: list[int]
    ends_document: bool


def encode_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Piece]:
    """Encode documents as `Tokenizer.encode_documents` does, each in one or more pieces that together have its ids.

    A document without any visible character has no ids, not even the wrapping: one empty piece.
    """
    cuts, wrapping = _may_be_cut(tokenizer), document_wrapping(tokenizer)
    batch: list[tuple[str, bool, bool]] = []
    n_characters = 0
    for document in documents:
        for piece in _with_ends(split_document(document, PIECE_SIZE) if cuts else iter(["".join(document)])):
            batch.append(piece)
            n_characters += len(piece[0])
            if n_characters >= BATCH_SIZE or len(batch) >= BATCH_TEXTS:
                yield from _encode(batch, tokenizer, *wrapping)
                batch, n_characters = [], 0
    yield from _encode(batch, tokenizer, *wrapping)


def _encode(
    batch: list[tuple[str, bool, bool]], tokenizer: Tokenizer, prefix: list[int], suffix: list[int]
) -> Iterator[Piece]:
    encoded = tokenizer.encode_batch([text for text, _, _ in batch], add_bos=False, add_eos=False)
    for (text, begins, ends), ids in zip(batch, encoded, strict=True):
        if begins and ends and (not text or text.isspace()):
            yield Piece([], True)
        else:
            yield Piece([*(prefix if begins else ()), *ids, *(suffix if ends else ())], ends)


def document_wrapping(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What `encode_documents` puts in front of a document and behind it."""
    [bare], [wrapped] = tokenizer.encode_batch(["a"], add_bos=False, add_eos=False), tokenizer.encode_documents(["a"])
    begin = next(i for i in range(len(wrapped)) if wrapped[i : i + len(bare)] == bare)
    return wrapped[:begin], wrapped[begin + len(bare) :]


def _with_ends(texts: Iterator[str]) -> Iterator[tuple[str, bool, bool]]:
    """Each text with whether it is the first and whether it is the last; one empty text where there is none."""
    begins, text = True, next(texts, "")
    for following in texts:
        yield text, begins, False
        begins, text = False, following
    yield text, begins, True


def split_document(document: Document, size: int) -> Iterator[str]:
    """The text of a document in pieces of about `size` characters, cut only where tokenizers cut as well.

    That is behind a newline between two characters that are not white space, or in front of a `\\r\\n` that follows a
    letter or digit: the pre-tokenizers of byte-level BPE always separate there, whatever comes before and after. A
    stretch without such a place stays in one piece, however long.
    """
    held: list[str] = []
    for chunk in document:
        for start in range(0, len(chunk), size):
            part = chunk[start : start + size]
            cut = _last_cut(part) if len(part) == size or held else 0
            if cut:
                yield "".join([*held, part[:cut]])
                held = [part[cut:]]
            else:
                held.append(part)
    if held:
        yield "".join(held)


def _last_cut(text: str) -> int:
    """The last place in `text` where it may be cut, or 0."""
    newline = text.rfind("\n", 1, -1)
    while newline > 0:
        before, after = text[newline - 1], text[newline + 1]
        if not before.isspace() and not after.isspace():
            return newline + 1
        if before == "\r" and newline > 1 and text[newline - 2].isalnum():
            return newline - 1
        newline = text.rfind("\n", 1, newline)
    return 0


def _may_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether texts may be encoded in pieces; not so where, as in SentencePiece, the start of a text is marked."""

    def encode(*texts: str) -> list[int]:
        return [i for ids in tokenizer.encode_batch(list(texts), add_bos=False, add_eos=False) for i in ids]

    return encode("a\nb") == encode("a\n", "b") and encode("a\r\nb") == encode("a", "\r\nb")

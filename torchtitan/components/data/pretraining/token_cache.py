"""Local documents as token ids on disk, built once per host, addressed by content, and mapped into
memory.

`{cache}/tokens/{key}/` holds `tokens.bin` (uint16, or uint32 for more than 65,536 token ids),
`offsets.bin` (int64: start of each document, and the total), `meta.json`, and checksums (see
`disk_cache`). Documents are encoded in batches (see `ArrayEncoder`) to use all threads with bounded
memory.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from torchtitan.components.data.disk_cache import map_array, open_or_build, readable
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.pretraining.tokens import ArrayTokens
from torchtitan.components.data.sources.rows import Document, OnRead
from torchtitan.components.data.sources.source import Source
from torchtitan.components.tokenizer import ArrayEncoder, DifferentIds, Tokenizer
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.progress import progress

FORMAT_VERSION = 3

PIECE_SIZE = 1 << 18
"""Approximate characters of the pieces of a long document; splitting does not change its tokens."""
BATCH_SIZE = 1 << 23
"""Approximate maximum characters encoded at a time."""
BATCH_TEXTS = 1 << 15
"""Maximum texts encoded at a time."""


class TokensMeta(TypedDict):
    """Content of `meta.json`."""

    dtype: str
    n_tokens: int
    documents_per_part: list[int]


class TokenCache(ArrayTokens):
    """Token ids of a dataset's documents, mapped into memory. Pickling stores only the path of the
    folder."""

    def __init__(self, folder: Path, names: list[str]):
        self.folder = folder
        with readable(folder):
            meta: TokensMeta = json.loads((folder / "meta.json").read_text())
            tokens = map_array(folder / "tokens.bin", meta["dtype"], meta["n_tokens"])
            offsets = map_array(
                folder / "offsets.bin", "int64", sum(meta["documents_per_part"]) + 1
            )
            super().__init__(folder.name, tokens, offsets, names, meta["documents_per_part"])
        self.place = str(folder / "tokens.bin")

    def __reduce__(self) -> tuple[object, ...]:
        return TokenCache, (self.folder, self.names)


def open_token_cache(
    source: Source, tokenizer: Tokenizer, cache_dir: str = "", *, verify: bool = False
) -> TokenCache:
    """Open the cached tokens of a source, encoding it if necessary; see `open_or_build`. Raise
    `UserError` if the data is invalid or empty, or the cache folder is not writable."""
    return open_or_build(
        "tokens",
        source,
        lambda identity: [
            FORMAT_VERSION,
            tokenizer.fingerprint,
            document_wrapping(tokenizer),
            identity,
        ],
        partial(TokenCache, names=[part.name for part in source.parts]),
        partial(_build, source, tokenizer),
        cache_dir,
        verify=verify,
    )


def _build(source: Source, tokenizer: Tokenizer, folder: Path) -> str:
    encoder = ArrayEncoder(tokenizer)
    try:
        meta = _write_with_progress(source, encoder, folder)
    except DifferentIds as error:
        logger.warning(f"{error.warning}; {source.name} is tokenized again")
        meta = _write_with_progress(source, encoder, folder)
    if meta["n_tokens"] < 2:
        raise UserError(f"{source.name} contains no text to train on")
    _warn_of_empty_parts(source, meta["documents_per_part"], folder / "offsets.bin")
    (folder / "meta.json").write_text(json.dumps(meta))
    return f"{sum(meta['documents_per_part']):,} documents, {meta['n_tokens']:,} tokens"


def _write_with_progress(source: Source, encoder: ArrayEncoder, folder: Path) -> TokensMeta:
    with progress(f"tokenizing {source.name}", source.size()) as advance:
        return write_tokens(source, encoder, folder, advance)


def token_dtype(tokenizer: Tokenizer) -> str:
    """Return the type of the stored token ids."""
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


def write_tokens(
    source: Source, encoder: ArrayEncoder, folder: Path, advance: OnRead
) -> TokensMeta:
    """Write `tokens.bin` and `offsets.bin` of a source, including empty documents; return the
    content of `meta.json`. Raise `DifferentIds` if the caller must rewrite the files, see
    `ArrayEncoder`."""
    dtype = np.dtype(token_dtype(encoder.tokenizer))
    n_tokens = 0
    documents_per_part = [0] * len(source.parts)

    def documents() -> Iterator[Document]:
        for index, part in enumerate(source.parts):
            encoder.sample_next()
            for document in part.documents(advance):
                documents_per_part[index] += 1
                yield document

    with (
        durable.new_file(folder / "tokens.bin") as tokens_file,
        durable.new_file(folder / "offsets.bin") as offsets_file,
    ):
        offsets_file.write(np.int64(0).tobytes())
        for batch in encode_documents(documents(), encoder):
            tokens_file.write(batch.ids.astype(dtype, copy=False).data)
            offsets_file.write((batch.ends + n_tokens).data)
            n_tokens += len(batch.ids)
    return TokensMeta(dtype=dtype.name, n_tokens=n_tokens, documents_per_part=documents_per_part)


def _warn_of_empty_parts(source: Source, documents_per_part: list[int], offsets_file: Path) -> None:
    offsets = np.memmap(offsets_file, dtype=np.int64, mode="r")
    at_bounds = offsets[[0, *itertools.accumulate(documents_per_part)]]
    empty = [
        part.name
        for part, n_tokens in zip(source.parts, np.diff(at_bounds), strict=True)
        if n_tokens == 0
    ]
    if empty:
        shown = ", ".join(empty[:3]) + (", ..." if len(empty) > 3 else "")
        logger.warning(
            f"{len(empty)} of {len(source.parts)} files of {source.name} contain no text: {shown}"
        )


class EncodedBatch(NamedTuple):
    """Token ids of consecutive documents. Other batches may also have parts of the first and the
    last document."""

    ids: np.ndarray
    """Ids with BOS and EOS at the documents' ends, uint32 (n,)."""
    ends: Array
    """Number of ids up to the end of each document that ends here, int64 (n_documents,)."""


class _Piece(NamedTuple):
    """Text of a document, or a part of it."""

    text: str
    begins: bool
    """True at the beginning of a document."""
    ends: bool

    @property
    def is_blank(self) -> bool:
        """True for a document without visible characters, which has no ids."""
        return self.begins and self.ends and (not self.text or self.text.isspace())


def encode_documents(
    documents: Iterable[Document], encoder: ArrayEncoder
) -> Iterator[EncodedBatch]:
    """Yield documents in batches, encoded as by `Tokenizer.encode_documents`, but without ids for
    those without visible characters. Raise `DifferentIds`, see `ArrayEncoder`."""
    is_splittable = _is_splittable(encoder.tokenizer)
    wrapping = document_wrapping(encoder.tokenizer)
    batch: list[_Piece] = []
    n_characters, begins = 0, True
    for document in documents:
        for text, ends in (
            split_document(document, PIECE_SIZE) if is_splittable else [("".join(document), True)]
        ):
            batch.append(_Piece(text, begins, ends))
            n_characters, begins = n_characters + len(text), ends
            if n_characters >= BATCH_SIZE or len(batch) >= BATCH_TEXTS:
                yield _encode(batch, encoder, *wrapping)
                batch, n_characters = [], 0
    yield _encode(batch, encoder, *wrapping)


def _encode(
    batch: Sequence[_Piece], encoder: ArrayEncoder, prefix: list[int], suffix: list[int]
) -> EncodedBatch:
    is_blank = np.fromiter((piece.is_blank for piece in batch), bool, len(batch))
    begins = np.fromiter((piece.begins for piece in batch), bool, len(batch)) & ~is_blank
    ends = np.fromiter((piece.ends for piece in batch), bool, len(batch))
    encoded = encoder.encode(
        [piece.text for piece, blank in zip(batch, is_blank.tolist(), strict=True) if not blank]
    )
    lengths = np.zeros(len(batch), np.int64)
    lengths[~is_blank] = encoded.lengths
    lengths += begins * len(prefix) + (ends & ~is_blank) * len(suffix)
    stops = np.cumsum(lengths)
    ids = np.empty(int(lengths.sum()), np.uint32)
    is_text = np.ones(len(ids), bool)
    at_begins = (stops - lengths)[begins][:, None] + np.arange(len(prefix))
    at_ends = stops[ends & ~is_blank][:, None] + np.arange(-len(suffix), 0)
    for places, added in ((at_begins, prefix), (at_ends, suffix)):
        ids[places] = added
        is_text[places] = False
    ids[is_text] = encoded.ids
    return EncodedBatch(ids, stops[ends])


def document_wrapping(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the token ids that `Tokenizer.encode_documents` puts before and after a document."""
    [bare] = tokenizer.encode_batch(["a"], add_bos=False, add_eos=False)
    [wrapped] = tokenizer.encode_documents(["a"])
    return around(bare, wrapped)


def around(bare: list[int], wrapped: list[int]) -> tuple[list[int], list[int]]:
    """Return the token ids of a text before and after those without special tokens. Raise
    `UserError` if special tokens change these."""
    begins = [i for i in range(len(wrapped)) if wrapped[i : i + len(bare)] == bare]
    if not begins:
        raise UserError(
            f"the tokenizer reads a text as {bare}, and with special tokens as {wrapped}, so what "
            "it puts before and after texts is unknown; use another tokenizer"
        )
    begin = begins[0]
    return wrapped[:begin], wrapped[begin + len(bare) :]


def split_document(document: Document, size: int) -> Iterator[tuple[str, bool]]:
    """Yield a document's text in pieces of about `size` characters, split only at boundaries of
    pre-tokens; each with whether it is the last.

    Byte-level BPE pre-tokenizers always split after a newline between two non-space characters, and
    before a `\\r\\n` after a letter or digit. Text without such a boundary is not split.
    """
    pending: list[str] = []
    for chunk in document:
        for start in range(0, len(chunk), size):
            part = chunk[start : start + size]
            cut = _last_cut(part) if len(part) == size or pending else 0
            if cut:
                yield "".join([*pending, part[:cut]]), False
                pending = [part[cut:]]
            else:
                pending.append(part)
    yield "".join(pending), True


def _last_cut(text: str) -> int:
    newline = text.rfind("\n", 1, -1)
    while newline > 0:
        before, after = text[newline - 1], text[newline + 1]
        if not before.isspace() and not after.isspace():
            return newline + 1
        if before == "\r" and newline > 1 and text[newline - 2].isalnum():
            return newline - 1
        newline = text.rfind("\n", 1, newline)
    return 0


def _is_splittable(tokenizer: Tokenizer) -> bool:
    """Return whether texts can be encoded in pieces; not with SentencePiece, which marks the start
    of a text."""

    def encode(*texts: str) -> list[int]:
        return [
            i
            for ids in tokenizer.encode_batch(list(texts), add_bos=False, add_eos=False)
            for i in ids
        ]

    return encode("a\nb") == encode("a\n", "b") and encode("a\r\nb") == encode("a", "\r\nb")

"""Local documents as token ids on disk: made once per host, found again by content, mapped into memory.

`{cache}/tokens/{key}/` holds `tokens.bin` (uint16, or uint32 for a vocabulary beyond 65,536), `offsets.bin` (int64:
where each document begins, and the total), `meta.json`, and their checksums (see `disk_cache`). The key is a digest of
everything that decides the tokens, so that a folder never has to change once it is there. It is written under another
name and renamed when complete.
"""

import bisect
import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.components.data.disk_cache import (
    cache_root,
    digest_of,
    file_digest,
    map_array,
    open_or_build,
    readable,
    token_dtype,
    writable,
)
from torchtitan.components.data.encoding import document_wrapping, encode_documents
from torchtitan.components.data.packing import Array
from torchtitan.components.data.progress import progress
from torchtitan.components.data.readers import Document
from torchtitan.components.data.sources import Source
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

FORMAT_VERSION = 2


class TokenCache:
    """The token ids of a data set, document behind document, mapped into memory.

    Sending it to another process sends the folder's name only.
    """

    def __init__(self, folder: Path, names: list[str]):
        self.folder = folder
        self.names = names
        with readable(folder):
            meta = json.loads((folder / "meta.json").read_text())
            self._first_documents = [0, *itertools.accumulate(meta["documents_per_part"])]
            self._tokens = map_array(folder / "tokens.bin", meta["dtype"], meta["n_tokens"])
            self._offsets = map_array(folder / "offsets.bin", "int64", self._first_documents[-1] + 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenCache, (self.folder, self.names)

    @property
    def key(self) -> str:
        """Equal keys mean equal tokens and documents."""
        return self.folder.name

    @property
    def n_tokens(self) -> int:
        """Number of tokens, those around each document included."""
        return len(self._tokens)

    @property
    def n_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self._offsets) - 1

    @property
    def lengths(self) -> Array:
        """Tokens of each document, (n_documents,)."""
        return np.diff(self._offsets)

    def tokens(self, start: int, stop: int) -> Array:
        """Token ids from `start` up to `stop` or the end of the data."""
        return self._tokens[start:stop].astype(np.int64)

    def starts(self, start: int, stop: int) -> Array:
        """Where documents begin, start <= where < stop, counted from `start`; the end of the data is no beginning."""
        low, high = np.searchsorted(self._offsets[:-1], (start, min(stop, self.n_tokens)))
        return np.array(self._offsets[low:high]) - start

    def document_at(self, token: int) -> int:
        """Number of the document, from 0 over all files, that holds the `token`-th token."""
        return int(np.searchsorted(self._offsets, token, side="right")) - 1

    def describe(self, first: int, last: int) -> str:
        """A range of documents in words, numbered from 1 in each file."""
        if self._place(first)[0] != self._place(last)[0]:
            return f"{self.describe(first, first)} to {self.describe(last, last)}"
        name, begin = self._place(first)
        _, end = self._place(last)
        return f"{name}, document {begin}" if begin == end else f"{name}, documents {begin}-{end}"

    def _place(self, document: int) -> tuple[str, int]:
        part = bisect.bisect_right(self._first_documents, document) - 1
        return self.names[part], document - self._first_documents[part] + 1


def open_token_cache(source: Source, tokenizer: Tokenizer, cache_dir: str = "", *, verify: bool = False) -> TokenCache:
    """The tokens of a source, encoded now if they are not in the cache, or damaged there.

    While one process encodes, others that want the same wait for it. `verify` reads the whole of a cache to find
    damage, and not a sample.

    Raises:
        UserError: the data is bad or empty, or the cache folder cannot be written.
    """
    root = cache_root(cache_dir)
    with writable(root):
        identity = source.identity(partial(file_digest, root))
        folder = root / "tokens" / _key(identity, tokenizer)
        return open_or_build(
            folder,
            partial(TokenCache, folder, [part.name for part in source.parts]),
            partial(_build, source, tokenizer),
            name=source.name,
            unchanged=lambda: source.identity(partial(file_digest, root)) == identity,
            verify=verify,
        )


def _key(identity: list[str], tokenizer: Tokenizer) -> str:
    return digest_of([FORMAT_VERSION, tokenizer.fingerprint, document_wrapping(tokenizer), identity])


def _build(source: Source, tokenizer: Tokenizer, folder: Path) -> str:
    meta = _write(source, tokenizer, folder)
    if meta["n_tokens"] < 2:
        raise UserError(f"{source.name} holds no text to train on")
    _warn_of_empty_parts(source, meta["documents_per_part"], folder / "offsets.bin")
    (folder / "meta.json").write_text(json.dumps(meta))
    return f"{sum(meta['documents_per_part']):,} documents, {meta['n_tokens']:,} tokens"


def _write(source: Source, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Write the tokens and offsets; returns the content of `meta.json`."""
    dtype = token_dtype(tokenizer.vocab_size)
    n_tokens = 0
    documents_per_part = [0] * len(source.parts)
    total = sum(part.size() for part in source.parts)

    def documents() -> Iterator[Document]:
        for index, part in enumerate(source.parts):
            for document in part.documents(advance):
                documents_per_part[index] += 1
                yield document

    with (
        progress(f"tokenizing {source.name}", total) as advance,
        (folder / "tokens.bin").open("wb") as tokens_file,
        (folder / "offsets.bin").open("wb") as offsets_file,
    ):
        offsets_file.write(np.int64(0).tobytes())
        for piece in encode_documents(documents(), tokenizer):
            tokens_file.write(np.array(piece.ids, dtype).tobytes())
            n_tokens += len(piece.ids)
            if piece.ends_document:
                offsets_file.write(np.int64(n_tokens).tobytes())
    return {"dtype": dtype.name, "n_tokens": n_tokens, "documents_per_part": documents_per_part}


def _warn_of_empty_parts(source: Source, documents_per_part: list[int], offsets_file: Path) -> None:
    offsets = np.memmap(offsets_file, dtype=np.int64, mode="r")
    at_bounds = offsets[[0, *itertools.accumulate(documents_per_part)]]
    empty = [part.name for part, n_tokens in zip(source.parts, np.diff(at_bounds), strict=True) if n_tokens == 0]
    if empty:
        shown = ", ".join(empty[:3]) + (", ..." if len(empty) > 3 else "")
        logger.warning(f"{len(empty)} of {len(source.parts)} files of {source.name} hold no text: {shown}")

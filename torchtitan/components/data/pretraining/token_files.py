"""Token files of other programs, read as they are: Megatron's `.bin` with `.idx`, datatrove's and
nanotron's `.ds` with `.ds.index`, litdata's folders of chunks, llm.c's and nanoGPT's `.bin`, and
OLMo's `.npy`.

Megatron's, datatrove's and litdata's files have an index of documents. The other formats mark
documents by the EOS token, before or after each.
"""

import glob
import json
import os
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np

from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.data.pretraining.token_cache import token_dtype
from torchtitan.components.data.pretraining.tokens import ArrayTokens, JoinedTokens, Tokens
from torchtitan.components.data.sources.files import file_format
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.digests import cache_root, digest_of, file_digest, remembered
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import named_file, open_regular, read_regular, regular_file
from torchtitan.tools.progress import progress

_SUFFIXES = (".bin", ".npy", ".ds")
_LITDATA_INDEX = "index.json"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the type, sequences, and entries of the document index."""
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_LLM_C_TYPES = {20240520: "uint16", 20240801: "uint32"}
"""Magic number of the header of 256 int32, followed by version and number of tokens → type of the
tokens."""
_LLM_C_HEADER = 256 * 4
_BLOCK = 1 << 22
"""Tokens that are compared with the vocabulary at a time."""


class LitdataChunk(TypedDict):
    """A chunk in litdata's index."""

    filename: str
    chunk_size: int
    """Items: documents."""
    dim: int
    """Tokens."""


@dataclass
class TokenFile:
    """A file of tokens up to its end. Raise `UserError` if the last token is cut."""

    path: Path
    dtype: str
    start: int = 0
    """Offset of the first token in bytes."""
    read_offsets: "Callable[[TokenFile], Array] | None" = None
    """Returns the first token of each document, and the number of tokens, (n_documents + 1,); None:
    EOS marks the documents."""

    def __post_init__(self) -> None:
        size, item_bytes = self.path.stat().st_size, np.dtype(self.dtype).itemsize
        self.n_tokens, rest = divmod(size - self.start, item_bytes)
        if rest:
            raise UserError(
                f"{self.path} has {size:,} bytes, which are not whole tokens of {item_bytes} bytes"
            )

    def map(self) -> np.ndarray:
        with open_regular(self.path) as file:
            return np.asarray(np.memmap(file, self.dtype, "r", self.start, (self.n_tokens,)))


def find_token_files(dataset: str, names: Sequence[str] = ()) -> list[Path]:
    """Return the token files at a path: a file, Megatron's path without `.bin`, litdata's folder, a
    folder without other data, or a glob pattern; sorted. Empty for other paths, or if the dataset
    is one of `names`. Raise `UserError` for a folder of MDS or of other items than tokens."""
    if not dataset or dataset in names:
        return []
    path = Path(os.path.expanduser(dataset))
    if chunks := _litdata_chunks(path):
        return [named_file(path, name, str(path / _LITDATA_INDEX)) for name in chunks]
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if not file.is_dir())
        files = [file for file in found if file.is_file() or file.suffix in _SUFFIXES]
        has_other = any(map(file_format, files))
        return (
            [] if has_other else [regular_file(file) for file in files if file.suffix in _SUFFIXES]
        )
    index = path if path.suffix == ".idx" else path.with_name(f"{path.name}.idx")
    if index.is_file():
        return [regular_file(index.with_suffix(".bin"))]
    matches = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))
    are_tokens = all(match.suffix in _SUFFIXES for match in matches)
    return list(map(regular_file, matches)) if are_tokens else []


def open_token_files(paths: Sequence[Path], tokenizer: Tokenizer, cache_dir: str = "") -> Tokens:
    """Open token files as one stream. Each file is read completely once, and the cache folder keeps
    the findings. Raise `UserError` for a damaged file, or token ids outside the vocabulary."""
    chunks = {folder: _litdata_chunks(folder) for folder in {path.parent for path in paths}}
    inspected = [_inspect(path, tokenizer, chunks[path.parent].get(path.name)) for path in paths]
    files = [file for file in inspected if file.n_tokens]
    first = np.cumsum([0, *(file.n_tokens for file in files)])
    if first[-1] < 2:
        raise UserError(f"{paths[0]} contains no tokens to train on")
    for file in files:
        _check_ids(file, tokenizer.vocab_size, cache_root(cache_dir))
    eos = -1 if tokenizer.eos_id is None else tokenizer.eos_id
    # A later file may begin in the middle of a document, so the first one shows where the
    # delimiters are.
    begins = (bool(file.map()[0] == eos) for file in files if not file.read_offsets)
    open_file = partial(_open, files, eos, next(begins, False))
    return JoinedTokens(files_digest(paths, cache_dir), first[:-1], int(first[-1]), open_file)


def files_digest(paths: Sequence[Path], cache_dir: str = "") -> str:
    """Return a digest of the content of the files and of their indexes."""
    indexes = {
        index
        for path in paths
        for index in (path.with_suffix(".idx"), path.parent / "index.json", _datatrove_index(path))
    }
    files = [*paths, *sorted(index for index in indexes if index.is_file())]
    return digest_of([file_digest(cache_root(cache_dir), path) for path in files])


def _inspect(path: Path, tokenizer: Tokenizer, chunk: LitdataChunk | None) -> TokenFile:
    """Open a file; `chunk` is its entry in litdata's index."""
    try:
        if chunk is not None:
            return _litdata(path, chunk["chunk_size"], chunk["dim"])
        if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
            return _megatron(path, path.with_suffix(".idx"))
        if path.suffix == ".ds":
            return _datatrove(path, _datatrove_index(path))
        with open_regular(path) as file:
            head = file.read(_LLM_C_HEADER)
        if head.startswith(b"\x93NUMPY"):
            return _numpy(path)
        if path.suffix == ".npy":
            return TokenFile(path, token_dtype(tokenizer))
        magic, _, n_tokens = (
            struct.unpack("<3i", head[:12]) if len(head) == _LLM_C_HEADER else (0, 0, 0)
        )
        if dtype := _LLM_C_TYPES.get(magic):
            _check_end(path, _LLM_C_HEADER + n_tokens * np.dtype(dtype).itemsize, "its header")
            return TokenFile(path, dtype, _LLM_C_HEADER)
        return TokenFile(path, "uint16")
    except UserError:
        raise
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _numpy(path: Path) -> TokenFile:
    """Open a file of `numpy.save`, whose header states type and shape."""
    with open_regular(path) as file:
        is_first = np.lib.format.read_magic(file) == (1, 0)
        read_header = (
            np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read_header(file)
        start = file.tell()
    if len(shape) != 1 or dtype.kind not in "iu":
        raise UserError(f"{path} holds {dtype} of shape {shape}, not a row of token ids")
    _check_end(path, start + shape[0] * dtype.itemsize, "its header")
    return TokenFile(path, dtype.str, start)


def _check_end(path: Path, expected: int, announced_by: str) -> None:
    if (size := path.stat().st_size) != expected:
        raise UserError(f"{path} ends at byte {size:,}, but {announced_by} announces {expected:,}")


def _check_ids(file: TokenFile, vocab_size: int, root: Path) -> None:
    """Raise `UserError` for the first token id outside the vocabulary; remember the least and the
    largest one."""
    if not (n_tokens := file.n_tokens):
        return
    what = f"least and largest {file.dtype} from byte {file.start} on"
    least, largest = map(
        int, remembered(root, what, [file.path], lambda: _range_of_ids(file)).split()
    )
    if 0 <= least and largest < vocab_size:
        return
    tokens = file.map()
    for first in range(0, n_tokens, _BLOCK):
        block = tokens[first : first + _BLOCK]
        if len(wrong := np.flatnonzero((block < 0) | (block >= vocab_size))):
            offset = file.start + (first + int(wrong[0])) * tokens.itemsize
            raise UserError(
                f"{file.path}: token {block[wrong[0]]} at offset {offset:,} is outside the "
                f"vocabulary of {vocab_size:,} tokens; use the tokenizer that wrote the file"
            )


def _range_of_ids(file: TokenFile) -> str:
    """Return the least and the largest token id of a file."""
    tokens = file.map()
    least, largest = int(tokens[0]), int(tokens[0])
    with progress(
        f"looking for token ids outside the vocabulary in {file.path}", file.n_tokens
    ) as advance:
        for first in range(0, file.n_tokens, _BLOCK):
            block = tokens[first : first + _BLOCK]
            least, largest = min(least, int(block.min())), max(largest, int(block.max()))
            advance(len(block))
    return f"{least} {largest}"


def _megatron(path: Path, index: Path) -> TokenFile:
    """Open tokens with an index of sequences, one or more per document."""
    with open_regular(index) as file:
        header = file.read(_MEGATRON_HEADER.size)
    if len(header) < _MEGATRON_HEADER.size or not header.startswith(b"MMIDIDX\0\0"):
        raise UserError(f"{index} is not a Megatron index: it does not begin with MMIDIDX")
    _, _, code, n_sequences, n_entries = _MEGATRON_HEADER.unpack(header)
    if not (dtype := _MEGATRON_TYPES.get(code)):
        raise UserError(f"{index} does not hold integers")
    expected = _MEGATRON_HEADER.size + 12 * n_sequences + 8 * n_entries
    if index.stat().st_size < expected:  # a multimodal index has more
        _check_end(index, expected, "its header")
    return TokenFile(
        path, dtype, read_offsets=partial(_megatron_offsets, index, n_sequences, n_entries)
    )


def _megatron_offsets(index: Path, n_sequences: int, n_entries: int, file: TokenFile) -> Array:
    """Read the lengths of the sequences, and the first sequence of each document."""
    with open_regular(index) as opened:
        opened.seek(_MEGATRON_HEADER.size)
        lengths = np.fromfile(opened, np.int32, n_sequences)
        opened.seek(_MEGATRON_HEADER.size + 12 * n_sequences)
        entries = np.fromfile(opened, np.int64, n_entries)
    starts = np.cumsum(np.append(0, lengths))
    _check_end(file.path, int(starts[-1]) * np.dtype(file.dtype).itemsize, "its index")
    is_ascending = all((numbers >= 0).all() for numbers in (lengths, np.diff(entries)))
    if not is_ascending or [*entries[:1], *entries[-1:]] != [0, n_sequences]:
        raise UserError(
            f"{index} does not divide {file.path} into documents; write both files again"
        )
    return starts[entries]


def _datatrove_index(path: Path) -> Path:
    return path.with_name(f"{path.name}.index")


def _datatrove(path: Path, index: Path) -> TokenFile:
    """Open tokens of 2 or 4 bytes, as the last end in the index tells."""
    if not index.is_file():
        raise UserError(f"{path} has no {index.name}, which says where its documents end")
    n_tokens, size = int(_datatrove_offsets(index)[-1]), path.stat().st_size
    item_bytes = size // n_tokens if n_tokens else 2
    if item_bytes not in (2, 4) or item_bytes * n_tokens != size:
        raise UserError(
            f"{path} ends at byte {size:,}, which does not fit the {n_tokens:,} tokens of {index}"
        )
    dtype = f"uint{8 * item_bytes}"
    return TokenFile(path, dtype, read_offsets=lambda _: _datatrove_offsets(index))


def _datatrove_offsets(index: Path) -> Array:
    """Read the end of each document in tokens."""
    with open_regular(index) as opened:
        ends = np.frombuffer(opened.read(), "<u8").astype(np.int64)
    offsets = np.append(0, ends)
    if (np.diff(offsets) < 0).any():
        raise UserError(f"{index} does not divide its file into documents; write both files again")
    return offsets


def _litdata_chunks(folder: Path) -> dict[str, LitdataChunk]:
    """Return the chunks of a folder written by litdata with its `TokensLoader`, by name; empty for
    other folders. Raise `UserError` if the items are not tokens, and for MDS."""
    try:
        index = json.loads(read_regular(folder / _LITDATA_INDEX))
        listed: list[LitdataChunk] = index.get("chunks", [])
        chunks = {chunk["filename"]: chunk for chunk in listed}
        is_mds, config = "shards" in index, index["config"] if chunks else {}
        kind = " ".join([*config.get("data_format", ()), config.get("compression") or ""]).strip()
        # the tokens of the chunk
        has_tokens = all(chunk.get("dim") is not None for chunk in chunks.values())
    except UserError:  # no regular file, or too large
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    if is_mds or chunks and not (has_tokens and re.fullmatch(r"no_header_\S+", kind)):
        problem = "is in MDS, whose library needs NumPy below 2.2 and transformers below 5"
        if not is_mds:
            problem = (
                f"holds litdata's items of type {kind}, not uncompressed tokens of its TokensLoader"
            )
        raise UserError(f"{folder} {problem}; write its texts as JSON Lines")
    return chunks


def _litdata(path: Path, n_items: int, n_tokens: int) -> TokenFile:
    """Open a chunk: the number of items (documents), their offsets in bytes, and the last one's
    end, all uint32; then their tokens."""
    size, start = path.stat().st_size, 4 * (n_items + 2)
    item_bytes, rest = divmod(size - start, max(1, n_tokens))
    if rest or item_bytes not in (1, 2, 4, 8):
        raise UserError(
            f"{path} ends at byte {size:,}, which does not fit {n_tokens:,} tokens from byte "
            f"{start:,} on"
        )
    # Types differ only for negative numbers and floats, which are not in the vocabulary.
    return TokenFile(path, f"uint{8 * item_bytes}", start, _litdata_offsets)


def _litdata_offsets(file: TokenFile) -> Array:
    with open_regular(file.path) as opened:
        n_items, *numbers = np.fromfile(opened, np.uint32, file.start // 4).tolist()
    offsets = np.array(numbers, np.int64)
    is_ascending = bool((np.diff(offsets) >= 0).all())
    ends = [file.start, file.path.stat().st_size]
    if not is_ascending or [offsets[0], offsets[-1]] != ends or n_items != len(offsets) - 1:
        raise UserError(
            f"{file.path} does not divide its tokens into documents; write the folder again"
        )
    return (offsets - offsets[0]) // np.dtype(file.dtype).itemsize


def _open(files: Sequence[TokenFile], eos: int, delimiter_first: bool, number: int) -> Tokens:
    """Open a file. The document starts of an index are kept in memory."""
    file = files[number]
    if file.read_offsets is None:
        return DelimitedTokens(file, eos, delimiter_first)
    offsets = file.read_offsets(file)
    return ArrayTokens(str(file.path), file.map(), offsets, [file.path.name], [len(offsets) - 1])


class DelimitedTokens(ArrayTokens):
    """Tokens with a delimiter before each document, or after each. The file is not searched to
    count documents."""

    def __init__(self, file: TokenFile, delimiter: int, delimiter_first: bool):
        super().__init__(str(file.path), file.map(), np.empty(0, np.int64), [file.path.name], [])
        self._delimiter, self._shift = delimiter, int(not delimiter_first)

    def starts(self, start: int, stop: int) -> Array:
        first = max(0, start - self._shift)
        delimiters = np.flatnonzero(
            self._tokens[first : min(stop, self.n_tokens) - self._shift] == self._delimiter
        )
        starts = delimiters + first + self._shift - start
        return np.append(0, starts) if start == 0 and self._shift else starts

    def locate(self, token: int) -> tuple[str, int]:
        return f"{self.names[0]}, token", token + 1

    def lengths(self) -> Array:
        """Return the tokens of each document that begins in the first 67 million tokens."""
        stop = min(self.n_tokens, 1 << 26)
        return np.diff(np.append(self.starts(0, stop), stop))

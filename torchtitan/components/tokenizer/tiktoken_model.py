"""tokenizer.model in tiktoken format, in which Llama 3 was published."""

import base64
import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer.interface import Offsets
from torchtitan.components.tokenizer.tokenizer_json import replace_surrogates
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import unreadable_file_error

# Llama 3's split pattern and special tokens (with Llama 3.1's names), as published with the model:
# https://github.com/meta-llama/llama-models/blob/main/models/llama3/tokenizer.py
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMED = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
_LLAMA3_N_SPECIAL = 256

# A million spaces overflow the stack of tiktoken's regex engine.
_LONG_BLANK = re.compile(r"(\s{500000})")


class Tiktoken:
    """`tokenizer.model` in tiktoken format: Llama 3's, with the special tokens after the ranks."""

    def __init__(self, path: Path):
        import tiktoken

        self.path = path
        self.content = path.read_bytes()
        self.changed_files: dict[str, bytes] = {}
        ranks = _parse_ranks(path, self.content)
        self.n_ranks = len(ranks)
        self.special = _llama3_special_tokens(self.n_ranks)
        self.vocab_size = self.n_ranks + len(self.special)
        self._encoding = tiktoken.Encoding(
            "llama3", pat_str=_LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=self.special
        )

    def add_special_tokens(self, tokens: Sequence[str]) -> int:
        if absent := [token for token in tokens if token not in self.special]:
            raise UserError(
                f"--tokenizer.added_tokens: cannot add {', '.join(absent)} to '{self.path}', a file in tiktoken "
                "format; use the model's tokenizer.json, or a chat template with special tokens of this tokenizer"
            )
        return 0

    def added_ids(self) -> tuple[list[int], list[int]]:
        return [self.special["<|begin_of_text|>"]], []

    def id_of(self, token: str) -> int | None:
        return self.special.get(token)

    def special_ids(self) -> frozenset[int]:
        return frozenset(self.special.values())

    def tokenize_with_offsets(self, texts: Sequence[str], *, allow_special: bool) -> list[tuple[list[int], Offsets]]:
        batch = self.tokenize(texts, allow_special=allow_special)
        return [(ids, self._offsets(text, ids)) for text, ids in zip(texts, batch, strict=True)]

    def _offsets(self, text: str, ids: list[int]) -> Offsets:
        ends = list(accumulate(map(len, self._encoding.decode_tokens_bytes(ids))))
        if text.isascii():
            return list(pairwise([0, *ends]))
        # Tokens are byte ranges of the text: map each byte to its character.
        characters = [i for i, char in enumerate(replace_surrogates(text)) for _ in char.encode()]
        return [(characters[start], characters[end - 1] + 1) for start, end in pairwise([0, *ends])]

    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]:
        n_threads = os.cpu_count() or 1
        size = math.ceil(len(texts) / n_threads) or 1
        slices = [texts[i : i + size] for i in range(0, len(texts), size)]
        encode = (
            partial(self._encoding.encode, allowed_special="all") if allow_special else self._encoding.encode_ordinary
        )

        def tokenize(texts: Sequence[str]) -> list[list[int]]:
            return [[token for piece in _LONG_BLANK.split(text) for token in encode(piece)] for text in texts]

        with ThreadPoolExecutor(n_threads) as pool:
            return [ids for slice_ids in pool.map(tokenize, slices) for ids in slice_ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        # Models may have more rows than tokens; ids of unused rows have no text, as with tokenizer.json.
        end = self.n_ranks if skip_special_tokens else self.vocab_size
        return self._encoding.decode([i for i in ids if i < end])


def convert_tiktoken(path: Path) -> Any:
    """Convert `Tiktoken(path)` to a tokenizer of the library `tokenizers`, without BOS. Like transformers'
    `TikTokenConverter`, every split of a token into two tokens becomes a merge, ordered by rank."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks = _parse_ranks(path, path.read_bytes())
    characters = _byte_characters()
    written = {token: "".join(characters[byte] for byte in token) for token in sorted(ranks, key=ranks.__getitem__)}
    merges = []
    for token in written:
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        splits = [(left, right) for left, right in halves if left in ranks and right in ranks]
        splits.sort(key=lambda split: (ranks[split[0]], ranks[split[1]]))
        merges += [(written[left], written[right]) for left, right in splits]
    vocab = {text: ranks[token] for token, text in written.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    special = _llama3_special_tokens(len(ranks))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return tokenizer


def _byte_characters() -> list[str]:
    """Return the character that represents each byte in `tokenizers`: itself if printable, else the next from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unused = count(256)
    return [chr(byte if byte in printable else next(unused)) for byte in range(256)]


def _parse_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    """Parse lines of `<base64 of the token's bytes> <rank>` into a dictionary."""
    # SentencePiece models are protobufs that begin with tag 0x0A, the list of pieces.
    if content.startswith(b"\x0a"):
        raise UserError(
            f"'{path}' is a SentencePiece model, which is not supported; convert it with transformers: "
            f"AutoTokenizer.from_pretrained('{path.parent}').save_pretrained('{path.parent}') writes tokenizer.json"
        )
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            message = f"'{path}' line {number} is not in tiktoken's format, `<base64> <rank>`"
            raise unreadable_file_error(path, message) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise UserError(f"'{path}' is incomplete: its {len(ranks)} ranks are not 0, 1, 2, ... with all single bytes")
    return ranks


def _llama3_special_tokens(first_id: int) -> dict[str, int]:
    """Return name → id of Llama 3's 256 special tokens: the named ones, and the numbered reserved ones."""
    unnamed = [offset for offset in range(_LLAMA3_N_SPECIAL) if offset not in _LLAMA3_NAMED]
    reserved = {offset: f"<|reserved_special_token_{n}|>" for n, offset in enumerate(unnamed)}
    return {name: first_id + offset for offset, name in sorted({**_LLAMA3_NAMED, **reserved}.items())}

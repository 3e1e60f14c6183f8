"""Files of byte-pair ranks, encoded by the library tiktoken: tiktoken's own format and Mistral's
tekken.json."""

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.components.tokenizer.interface import Offsets
from torchtitan.components.tokenizer.probes import probe_texts
from torchtitan.components.tokenizer.tokenizer_json import (
    NO_BYTES,
    byte_characters,
    replace_surrogates,
    wrap_errors,
)
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import parse_json, read_object, read_regular, unreadable_file_error
from torchtitan.tools.process import usable_cores

if TYPE_CHECKING:
    import tokenizers

# Llama 3's split pattern and special tokens (with Llama 3.1's names), as published with the model:
# https://github.com/meta-llama/llama-models/blob/main/models/llama3/tokenizer.py
_LLAMA3_SHA256 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
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

# Special tokens of tekken.json files that list none (versions up to v7):
# https://github.com/mistralai/mistral-common, Tekkenizer
_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
_TEKKEN_VERSIONS_WITHOUT_LIST = ("v1", "v2", "v3", "v7")

_CANNOT_CONVERT = "cannot be converted to tokenizer.json"

# A million spaces overflow the stack of tiktoken's regex engine.
_LONG_BLANK_LENGTH = 500_000
_LONG_BLANK = re.compile(rf"(\s{{{_LONG_BLANK_LENGTH}}})")


@dataclass(frozen=True)
class RankFile:
    """Content of a file of ranks. Two tokens are merged first if the id of their union is
    lowest."""

    path: Path
    content: bytes
    """Content of the file, for fingerprints."""
    ids: Mapping[bytes, int]
    """Bytes of each ordinary token and its id."""
    special: Mapping[str, int]
    """Text of each special token and its id."""
    pattern: str
    """Regular expression that splits text into pieces before merging."""
    bos: str | None
    """Special token that begins a text, if the format defines one."""

    @property
    def vocab_size(self) -> int:
        return max(*self.ids.values(), *self.special.values()) + 1


class Tiktoken:
    """Tokenizer of a `RankFile`. Raises `UserError` if the split pattern is not valid."""

    def __init__(self, file: RankFile):
        import tiktoken

        self.file, self.content = file, file.content
        self.changed_files: dict[str, bytes] = {}
        self.vocab_size = file.vocab_size
        self._texts = {token_id: text for text, token_id in file.special.items()}
        self._ordinary = frozenset(file.ids.values())
        try:
            self._encoding = tiktoken.Encoding(
                "ranks",
                pat_str=file.pattern,
                mergeable_ranks=dict(file.ids),
                special_tokens=dict(file.special),
            )
        except ValueError as error:
            raise UserError(f"'{file.path}': the split pattern is not valid: {error}") from error

    def add_special_tokens(self, tokens: Sequence[str]) -> int:
        if absent := [token for token in tokens if token not in self.file.special]:
            raise UserError(
                f"--tokenizer.added_tokens: cannot add {', '.join(absent)} to '{self.file.path}', "
                "a file in tiktoken format; use the model's tokenizer.json, or a chat template "
                "with special tokens of this tokenizer"
            )
        return 0

    def added_ids(self) -> tuple[list[int], list[int]]:
        return [] if self.file.bos is None else [self.file.special[self.file.bos]], []

    def as_hugging_face(self) -> "tokenizers.Tokenizer":
        """Return a `tokenizers.Tokenizer`; see `convert_ranks`."""
        return convert_ranks(self.file)

    def id_of(self, token: str) -> int | None:
        return self.file.special.get(token)

    def added_tokens(self) -> dict[str, int]:
        """Return the text and the id of each special token."""
        return dict(self.file.special)

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of each token by its id; ids without a token get `NO_BYTES`."""
        table = [NO_BYTES] * self.vocab_size
        for token, token_id in self.file.ids.items():
            table[token_id] = token
        for text, token_id in self.file.special.items():
            table[token_id] = text.encode()
        return table

    def special_ids(self) -> frozenset[int]:
        return frozenset(self._texts)

    def tokenize_with_offsets(
        self, texts: Sequence[str], *, allow_special: bool
    ) -> list[tuple[list[int], Offsets]]:
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
        n_threads = usable_cores()
        size = math.ceil(len(texts) / n_threads) or 1
        slices = [texts[i : i + size] for i in range(0, len(texts), size)]
        encode = (
            partial(self._encoding.encode, allowed_special="all")
            if allow_special
            else self._encoding.encode_ordinary
        )

        def tokenize(texts: Sequence[str]) -> list[list[int]]:
            return [
                [token for piece in _LONG_BLANK.split(text) for token in encode(piece)]
                for text in texts
            ]

        with ThreadPoolExecutor(n_threads) as pool:
            return [ids for slice_ids in pool.map(tokenize, slices) for ids in slice_ids]

    def is_divided(self, text: str) -> bool:
        """Return whether `tokenize` divides a text at blanks that the tokenizer keeps together."""
        step = _LONG_BLANK_LENGTH  # every run of this length has a character at one of the places
        places = range(step - 1, len(text), step)
        return any(text[i].isspace() for i in places) and _LONG_BLANK.search(text) is not None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        # Models may have more rows than tokens; ids of unused rows have no text, as with
        # tokenizer.json.
        def has_text(token_id: int) -> bool:
            return token_id in self._ordinary or (
                token_id in self._texts and not skip_special_tokens
            )

        return self._encoding.decode([token_id for token_id in ids if has_text(token_id)])


def read_tiktoken(path: Path, split_pattern: str = "") -> RankFile:
    """Read a file in tiktoken's format, lines of `<base64 of the token's bytes> <rank>`.

    The format has neither the split pattern nor the special tokens. Llama 3's are known, and used
    if the ranks are Llama 3's. Otherwise, `split_pattern` is required, and the special tokens come
    from tokenizer_config.json or added_tokens.json in the same folder. Raise `UserError` for other
    content.
    """
    content = read_regular(path)
    ids = _parse_ranks(path, content)
    if hashlib.sha256(content).hexdigest() == _LLAMA3_SHA256 and not split_pattern:
        special = _llama3_special_tokens(len(ids))
        return RankFile(path, content, ids, special, _LLAMA3_PATTERN, "<|begin_of_text|>")
    if not split_pattern:
        raise UserError(
            f"'{path}' has {len(ids):,} ranks in tiktoken's format, which are not Llama 3's, and "
            "the format lacks the pattern that splits text before merging; use the model's "
            "tokenizer.json, or set --tokenizer.split_pattern to the pattern in the model's code "
            "(usually called pat_str)"
        )
    special = declared_tokens(path.parent)
    if clashes := sorted(set(special.values()) & set(ids.values())):
        raise UserError(
            f"'{path.parent}' declares a special token with id {clashes[0]}, which '{path}' uses "
            "as a rank"
        )
    return RankFile(path, content, ids, special, split_pattern, None)


def read_tekken(path: Path) -> RankFile:
    """Read Mistral's tekken.json: the ids of special tokens come first, then the ids of ranks.
    Raise `UserError` for other content."""
    content = read_regular(path)
    document: Any = parse_json(content, f"'{path}'")
    try:
        config, vocab = document["config"], document["vocab"]
        n_special = int(config["default_num_special_tokens"])
        n_ranks = int(config["default_vocab_size"]) - n_special
        pattern, version = str(config["pattern"]), str(config.get("version"))
        ranks = {
            base64.b64decode(token["token_bytes"], validate=True): int(token["rank"])
            for token in vocab[:n_ranks]
        }
        listed = document.get("special_tokens")
        named = (
            None
            if listed is None
            else {int(token["rank"]): str(token["token_str"]) for token in listed}
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unreadable_file_error(path, f"'{path}' is not a tekken.json: {error!r}") from error
    if named is None:
        if version not in _TEKKEN_VERSIONS_WITHOUT_LIST:
            raise UserError(
                f"'{path}' has version {version} and no special_tokens; use the model's own "
                "tekken.json"
            )
        named = dict(enumerate(_TEKKEN_SPECIAL))
    _check_ranks(path, ranks)
    if len(ranks) != n_ranks or not named.keys() <= set(range(n_special)):
        raise UserError(f"'{path}' is incomplete: it has {len(ranks):,} of {n_ranks:,} ranks")
    special = {named.get(i, f"<SPECIAL_{i}>"): i for i in range(n_special)}
    if len(special) != n_special or "<s>" not in special:
        raise UserError(f"'{path}' has special tokens with equal texts, or none called <s>")
    ids = {token: rank + n_special for token, rank in ranks.items()}
    return RankFile(path, content, ids, special, pattern, "<s>")


def declared_tokens(folder: Path) -> dict[str, int]:
    """Return the tokens that tokenizer_config.json (`added_tokens_decoder`) and added_tokens.json
    of a folder declare, with their ids. Raise `UserError` if one of the files has another
    structure."""
    tokens: dict[str, int] = {}
    path = folder / "added_tokens.json"
    for text, token_id in read_object(path).items():
        tokens[text] = _checked_id(token_id, path)
    path = folder / "tokenizer_config.json"
    declared = read_object(path).get("added_tokens_decoder") or {}
    for token_id, token in declared.items() if isinstance(declared, dict) else [(None, declared)]:
        if not (isinstance(token, dict) and isinstance(token.get("content"), str)):
            raise UserError(f"'{path}' has the added token {token!r}, which has no text")
        tokens[token["content"]] = _checked_id(token_id, path)
    return tokens


def _checked_id(value: object, path: Path) -> int:
    if isinstance(value, int | str) and not isinstance(value, bool):
        if str(value).isdecimal() and int(value) < 2**24:
            return int(value)
    raise UserError(f"'{path}' has an added token with id {value!r}")


def convert_ranks(file: RankFile) -> "tokenizers.Tokenizer":
    """Convert `Tiktoken(file)` to a tokenizer of the library `tokenizers`, without BOS. Like
    transformers' `TikTokenConverter`, every split of a token into two tokens becomes a merge,
    ordered by id. Raise `UserError` if the ids of a text differ from tiktoken's (see
    `probe_texts`)."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = file.ids
    characters = byte_characters()
    written = {
        token: "".join(characters[byte] for byte in token)
        for token in sorted(ids, key=ids.__getitem__)
    }
    merges = []
    for token in written:
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        splits = [(left, right) for left, right in halves if left in ids and right in ids]
        splits.sort(key=lambda split: (ids[split[0]], ids[split[1]]))
        merges += [(written[left], written[right]) for left, right in splits]
    # Special tokens must be in the vocabulary, since their ids may precede the others or have gaps.
    vocab = dict(file.special) | {text: ids[token] for token, text in written.items()}
    with wrap_errors(file.path, _CANNOT_CONVERT):
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
        split = pre_tokenizers.Split(Regex(file.pattern), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
        tokenizer.decoder = decoders.ByteLevel()
        special = sorted(file.special, key=file.special.__getitem__)
        tokenizer.add_special_tokens(
            [AddedToken(name, normalized=False, special=True) for name in special]
        )
        _check_conversion(file, tokenizer)
    return tokenizer


def _check_conversion(file: RankFile, tokenizer: "tokenizers.Tokenizer") -> None:
    reference = Tiktoken(file)
    texts = probe_texts([*file.special], [token.decode(errors="ignore") for token in file.ids])
    for allow_special in (False, True):
        tokenizer.encode_special_tokens = not allow_special
        expected = reference.tokenize(texts, allow_special=allow_special)
        for text, ids in zip(texts, expected, strict=True):
            if tokenizer.encode(text, add_special_tokens=False).ids != ids:
                raise UserError(
                    f"'{file.path}' {_CANNOT_CONVERT}: the ids of {text[:60]!r} would differ from "
                    "tiktoken's; use the model's tokenizer.json"
                )
    tokenizer.encode_special_tokens = False


def _parse_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    """Parse lines of `<base64 of the token's bytes> <rank>` into a dictionary."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            message = f"'{path}' line {number} is not in tiktoken's format, `<base64> <rank>`"
            raise unreadable_file_error(path, message) from error
    _check_ranks(path, ranks)
    return ranks


def _check_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    has_all_bytes = all(bytes([byte]) in ranks for byte in range(256))
    if not has_all_bytes or sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(
            f"'{path}' is incomplete: its {len(ranks)} ranks are not 0, 1, 2, ... with all single "
            "bytes"
        )


def _llama3_special_tokens(first_id: int) -> dict[str, int]:
    """Return name → id of Llama 3's 256 special tokens: the named ones, and the numbered reserved
    ones."""
    unnamed = [offset for offset in range(_LLAMA3_N_SPECIAL) if offset not in _LLAMA3_NAMED]
    reserved = {offset: f"<|reserved_special_token_{n}|>" for n, offset in enumerate(unnamed)}
    return {
        name: first_id + offset for offset, name in sorted({**_LLAMA3_NAMED, **reserved}.items())
    }

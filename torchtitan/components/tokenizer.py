"""Text to token ids and back: `Tokenizer`, the interface, and `PretrainedTokenizer`, which reads a model's files."""

import base64
import hashlib
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

from torchtitan.config.configurable import Configurable
from torchtitan.tools.errors import UserError
from torchtitan.tools.json_file import read_object

Offsets = list[tuple[int, int]]
"""For each token, where the text that it stands for begins and ends, in characters. Each of several tokens that share
a character spans all of it."""

EMBEDDED_TOKENIZER = Path(__file__).parents[1] / "assets" / "tokenizer"
"""Folder of the tokenizer that the package brings along, trained on `Stories`."""


class Tokenizer(Configurable, ABC):
    """Text to token ids and back, with BOS and EOS as the model's own configuration says.

    The trainer builds it as `config.build(path=hf_assets_path)`. A subclass of this class sets the attributes below
    and defines `tokenize` and `decode`; the rest follows from them.
    """

    vocab_size: int
    """Largest token id plus one, added tokens included."""
    bos_id: int | None
    """Id of the token that begins a text, if there is one."""
    eos_id: int | None
    """Id of the token that ends a text, if there is one."""
    adds_bos: bool
    """Whether the model's own configuration puts BOS in front of a text."""
    adds_eos: bool
    """Whether the model's own configuration puts EOS behind a text."""
    folder: Path | None = None
    """Where the files lie that it was read from: checkpoints carry a copy of them. None: it is not made of files."""
    n_added: int = 0
    """How many of the token ids are additions to those in its files: rows that a published model does not have."""
    fingerprint: str
    """Hexadecimal digest of what decides the ids of a text (the files, BOS and EOS, the class), for a cache's key."""

    @property
    def changed_files(self) -> dict[str, bytes]:
        """Content by name of those files that checkpoints carry in another form than `folder` has them."""
        return {}

    @abstractmethod
    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]:
        """Token ids of each text, without BOS and EOS around it.

        `allow_special`: whether text that spells a special token becomes that token, or stays ordinary text. (Added
        tokens that the model's file does not mark as special, such as Qwen's "<think>", are part of any text.)
        """

    def tokenize_with_offsets(self, texts: Sequence[str], *, allow_special: bool) -> list[tuple[list[int], Offsets]]:
        """The same ids with where each of them lies in the text: loss masks of conversations come from there.

        A text with surrogates in it, which are half a character each, is seen with the pairs of them joined.

        Raises:
            UserError: where a subclass does not define it.
        """
        raise UserError(
            f"the tokenizer {type(self).__name__} does not tell where its tokens lie in a text, which loss masks need; "
            "define its tokenize_with_offsets"
        )

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that mark something instead of standing for text."""
        return frozenset(token_id for token_id in (self.bos_id, self.eos_id) if token_id is not None)

    def id_of(self, token: str) -> int | None:
        """Id of the one token that `token` spells; None where it takes several."""
        [ids] = self.tokenize([token], allow_special=True)
        return ids[0] if len(ids) == 1 else None

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 (a character cut in two) become U+FFFD."""

    def encode(
        self, text: str, *, add_bos: bool | None = None, add_eos: bool | None = None, allow_special: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any text.
            add_bos: whether the ids begin with BOS; None: as the model's own configuration says. Never two of them,
                also where the text itself begins with the token (`allow_special`).
            add_eos: the same for EOS at the end.
            allow_special: whether text that spells a special token, say "<|end_of_text|>", becomes that token. Only for
                text that the program itself has put together, such as a chat template's: somebody else's text must
                not be able to end a document.

        Raises:
            UserError: when a token is to be added that the tokenizer does not have.
        """
        return self.encode_batch([text], add_bos=add_bos, add_eos=add_eos, allow_special=allow_special)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        allow_special: bool = False,
    ) -> list[list[int]]:
        """`encode` of each text, in parallel over the cores."""
        prefix = self._added("BOS", self.bos_id, self.adds_bos if add_bos is None else add_bos)
        suffix = self._added("EOS", self.eos_id, self.adds_eos if add_eos is None else add_eos)
        return [_wrap(ids, prefix, suffix) for ids in self.tokenize(texts, allow_special=allow_special)]

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of pre-training documents, in parallel over the cores.

        BOS in front if the model's own configuration adds it; EOS behind whenever the tokenizer has one, since it is
        from there that a model learns to stop. No text becomes a special token.
        """
        return self.encode_batch(texts, add_eos=self.eos_id is not None)

    def _added(self, name: str, token_id: int | None, add: bool) -> list[int]:
        if not add:
            return []
        if token_id is None:
            raise UserError(f"cannot add {name}: the tokenizer has none; leave add_{name.lower()} out")
        return [token_id]


class PretrainedTokenizer(Tokenizer):
    """The tokenizer in a model's folder; without a folder, the embedded one.

    `tokenizer.json` (read by the library `tokenizers`) wins over `tokenizer.model` in tiktoken format, which is taken
    for Llama 3's. Which tokens are BOS and EOS is looked up in tokenizer_config.json, special_tokens_map.json,
    config.json, generation_config.json and, where none of them says, by the names that are usual. Whether they are
    added is up to `add_bos_token` and `add_eos_token` of tokenizer_config.json, else up to the tokenizer itself.

    Args:
        config: what to add to the vocabulary.
        path: folder with the files; empty: the embedded tokenizer.

    Raises:
        UserError: when the folder has no tokenizer, or one that cannot be used or extended.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Tokenizer.Config):
        """What is added to a tokenizer's files."""

        added_tokens: list[str] = field(default_factory=list)
        """Special tokens, as <|im_start|>, to add where the vocabulary lacks them; the model gets rows for them."""

        def validate(self) -> None:
            """Raise `UserError` for a text that cannot be a token."""
            if blank := [token for token in self.added_tokens if not token.strip()]:
                raise UserError(f"--tokenizer.added_tokens has {blank[0]!r}, and needs texts that are not blank")

    def __init__(self, config: Config, *, path: str | Path = ""):
        super().__init__(config)
        self.folder = folder = Path(path) if str(path) else EMBEDDED_TOKENIZER
        self._backend = _load_backend(folder)
        self.n_added = self._backend.add_special_tokens(config.added_tokens) if config.added_tokens else 0
        settings = read_object(folder / "tokenizer_config.json")
        prefix, suffix = self._backend.added_ids()
        self.vocab_size = self._backend.vocab_size
        self.bos_id = _special_id(folder, "bos", self._backend)
        self.eos_id = _special_id(folder, "eos", self._backend)
        self.adds_bos = _adds(self.bos_id, settings.get("add_bos_token"), prefix)
        self.adds_eos = _adds(self.eos_id, settings.get("add_eos_token"), suffix)
        parts = [type(self).__module__, type(self).__qualname__, type(self._backend).__name__]
        parts += [hashlib.sha256(self._backend.content).hexdigest()]
        parts += [str(x) for x in (self.bos_id, self.eos_id, self.adds_bos, self.adds_eos)]
        self.fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def changed_files(self) -> dict[str, bytes]:
        """The tokenizer's file with the added tokens, where there are any."""
        return self._backend.changed_files

    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]:
        return self._backend.tokenize(texts, allow_special=allow_special)

    def tokenize_with_offsets(self, texts: Sequence[str], *, allow_special: bool) -> list[tuple[list[int], Offsets]]:
        """Ids and character spans; see `Tokenizer`. (White space that a token begins with is part of its span.)"""
        if type(self).tokenize is not PretrainedTokenizer.tokenize:  # a subclass has other ids
            return super().tokenize_with_offsets(texts, allow_special=allow_special)
        return self._backend.tokenize_with_offsets(texts, allow_special=allow_special)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that the file marks as special."""
        return self._backend.special_ids()

    def id_of(self, token: str) -> int | None:
        """Id of a token of the vocabulary; None where it has no such token."""
        return self._backend.id_of(token)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)


def _wrap(ids: list[int], prefix: list[int], suffix: list[int]) -> list[int]:
    """`ids` that begin with `prefix` and end with `suffix` (of one token or none), neither of them doubled."""
    if ids[: len(prefix)] != prefix:
        ids = prefix + ids
    return ids if not suffix or ids[len(prefix) :][-1:] == suffix else ids + suffix


# What a model's folder says.

_USUAL_NAMES = {
    "bos": ("<|begin_of_text|>", "<s>", "<bos>"),
    "eos": ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>"),
}


def _load_backend(folder: Path) -> "_Backend":
    if not folder.is_dir():
        raise UserError(f"'{folder}' is not a folder; name the folder that holds tokenizer.json or tokenizer.model")
    if (folder / "tokenizer.json").is_file():
        return _HuggingFace(folder / "tokenizer.json")
    if (folder / "tokenizer.model").is_file():
        return _Tiktoken(folder / "tokenizer.model")
    raise UserError(
        f"no tokenizer in '{folder}': it has neither tokenizer.json (Hugging Face) nor tokenizer.model (tiktoken)"
    )


def _special_id(folder: Path, kind: str, backend: "_Backend") -> int | None:
    """Id of the `kind` ("bos" or "eos") token; a file that names it decides, also when it says null."""
    for path in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        content = read_object(path)
        if f"{kind}_token" in content:
            return _named_id(content[f"{kind}_token"], path, kind, backend)
    for path in (folder / "config.json", folder / "generation_config.json"):
        declared = read_object(path).get(f"{kind}_token_id")
        if declared not in (None, []):
            # Several ids are several ways to stop generating; the first is the model's own end of text.
            token_id = declared[0] if isinstance(declared, list) else declared
            if token_id not in range(backend.vocab_size):
                raise UserError(f"'{path}' has {kind}_token_id {declared}, not an id of the tokenizer beside it")
            return int(token_id)
    ids = (backend.id_of(name) for name in _USUAL_NAMES[kind])
    return next((token_id for token_id in ids if token_id is not None), None)


def _named_id(token: Any, path: Path, kind: str, backend: "_Backend") -> int | None:
    """Id of a token written as null, a string, or an object with its `content` (a serialized `AddedToken`)."""
    name = token.get("content") if isinstance(token, dict) else token
    if name is None:
        return None
    token_id = backend.id_of(name) if isinstance(name, str) else None
    if token_id is None:
        raise UserError(f"'{path}' has {kind}_token {name!r}, which is no token of the tokenizer beside it")
    return token_id


def _adds(token_id: int | None, declared: bool | None, added: list[int]) -> bool:
    """Whether a token is added to a text: as the configuration declares, else as the tokenizer itself does."""
    return token_id is not None and (token_id in added if declared is None else declared)


# The two formats.


class _Backend(Protocol):
    """A tokenizer in one file format."""

    content: bytes
    """Bytes of the file."""
    vocab_size: int

    @property
    def changed_files(self) -> dict[str, bytes]:
        """File name → content, where that is no longer what the folder has."""

    def add_special_tokens(self, tokens: Sequence[str]) -> int:
        """Make `tokens` special tokens, with ids behind the last one where they have none; how many had none."""

    def added_ids(self) -> tuple[list[int], list[int]]:
        """What the tokenizer itself puts in front of a text and behind it."""

    def id_of(self, token: str) -> int | None: ...

    def special_ids(self) -> frozenset[int]: ...

    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]: ...

    def tokenize_with_offsets(
        self, texts: Sequence[str], *, allow_special: bool
    ) -> list[tuple[list[int], Offsets]]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class _HuggingFace:
    """`tokenizer.json`, by the library `tokenizers`."""

    def __init__(self, path: Path):
        self.path = path
        self.content = path.read_bytes()
        self.is_changed = False
        vocab = self._literal.get_vocab(with_added_tokens=True)
        if not vocab:
            raise UserError(f"'{path}' has an empty vocabulary")
        self.vocab_size = max(vocab.values()) + 1

    def __getstate__(self) -> dict[str, Any]:
        # A pickled `tokenizers.Tokenizer` forgets `encode_special_tokens`: the copy reads the content again.
        return {name: self.__dict__[name] for name in ("path", "content", "is_changed", "vocab_size")}

    @property
    def changed_files(self) -> dict[str, bytes]:
        return {self.path.name: self.content} if self.is_changed else {}

    def add_special_tokens(self, tokens: Sequence[str]) -> int:
        from tokenizers import AddedToken

        tokenizer = self._read()
        # One that is added already stands for itself in any text: it stays as it is.
        present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        missing = [token for token in dict.fromkeys(tokens) if token not in present]
        new = [token for token in missing if tokenizer.token_to_id(token) is None]
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in missing])
        if [tokenizer.token_to_id(token) for token in new] != list(range(self.vocab_size, self.vocab_size + len(new))):
            raise UserError(f"'{self.path}' has unused ids below its last one, so that no tokens can be added to it")
        if missing:
            # Everything is made of the content again, as it is by those who read the checkpoint.
            self.content, self.is_changed = tokenizer.to_str(pretty=True).encode(), True
            self.vocab_size += len(new)
            for name in ("_literal", "_parsing"):
                self.__dict__.pop(name, None)
        return len(new)

    @cached_property
    def _literal(self) -> Any:
        """Takes text that spells a special token as ordinary text."""
        return self._load(literal=True)

    @cached_property
    def _parsing(self) -> Any:
        """Turns it into the token. An object of its own: switching one back and forth would not be thread-safe."""
        return self._load(literal=False)

    def _read(self) -> Any:
        import tokenizers

        try:
            return tokenizers.Tokenizer.from_buffer(self.content)
        except Exception as error:  # the library raises nothing more specific
            raise UserError(f"'{self.path}' is not a tokenizer that `tokenizers` can read: {error}") from error

    def _load(self, *, literal: bool) -> Any:
        tokenizer = self._read()
        # Files often carry the settings of the example they were saved from, which would cut documents short.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # It puts BOS and EOS around a text, which is ours to do, and for some models cuts white space off the offsets.
        self._post_processor, tokenizer.post_processor = tokenizer.post_processor, None
        tokenizer.encode_special_tokens = literal
        return tokenizer

    def added_ids(self) -> tuple[list[int], list[int]]:
        encoding = self._literal.encode("a")
        plain, full = encoding.ids, (self._post_processor.process(encoding) if self._post_processor else encoding).ids
        start = next(i for i in range(len(full) + 1) if full[i : i + len(plain)] == plain)
        return full[:start], full[start + len(plain) :]

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self._literal.token_to_id(token)
        return token_id

    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]:
        tokenizer = self._parsing if allow_special else self._literal
        encodings = tokenizer.encode_batch_fast([_without_surrogates(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def tokenize_with_offsets(self, texts: Sequence[str], *, allow_special: bool) -> list[tuple[list[int], Offsets]]:
        tokenizer = self._parsing if allow_special else self._literal
        encodings = tokenizer.encode_batch([_without_surrogates(text) for text in texts], add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def special_ids(self) -> frozenset[int]:
        added = self._literal.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._literal.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


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

# The pattern's backtracking overflows the stack of tiktoken's regex engine in about a million blanks on end.
_LONG_BLANK = re.compile(r"(\s{500000})")


class _Tiktoken:
    """`tokenizer.model` in tiktoken format: Llama 3's, with the special tokens behind the ranks."""

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
                f"--tokenizer.added_tokens: {', '.join(absent)} cannot be added to '{self.path}', a file in tiktoken "
                "format; use the model's tokenizer.json, or a chat template of this tokenizer's own special tokens"
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
        # The bytes of the tokens are those of the text: of each byte, the character that it belongs to.
        characters = [i for i, char in enumerate(_without_surrogates(text)) for _ in char.encode()]
        return [(characters[start], characters[end - 1] + 1) for start, end in pairwise([0, *ends])]

    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]:
        n_threads = os.cpu_count() or 1
        size = math.ceil(len(texts) / n_threads) or 1
        slices = [texts[i : i + size] for i in range(0, len(texts), size)]
        tokenize = partial(self._tokenize_slice, allow_special=allow_special)
        with ThreadPoolExecutor(n_threads) as pool:
            return [ids for slice_ids in pool.map(tokenize, slices) for ids in slice_ids]

    def _tokenize_slice(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]:
        return [self._tokenize_one(text, allow_special=allow_special) for text in texts]

    def _tokenize_one(self, text: str, *, allow_special: bool) -> list[int]:
        ids: list[int] = []
        for piece in _LONG_BLANK.split(text):
            if allow_special:
                ids += self._encoding.encode(piece, allowed_special="all")
            else:
                ids += self._encoding.encode_ordinary(piece)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._encoding.decode([i for i in ids if not (skip_special_tokens and i >= self.n_ranks)])


def _parse_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    """Token bytes to rank, from lines of `<base64 of the bytes> <rank>`."""
    # A SentencePiece model is a protobuf whose first field, the pieces, has the tag 0x0A.
    if content.startswith(b"\x0a"):
        raise UserError(
            f"'{path}' is a SentencePiece model, which is not read directly; convert it once with transformers: "
            f"AutoTokenizer.from_pretrained('{path.parent}').save_pretrained('{path.parent}') writes tokenizer.json"
        )
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(f"'{path}' line {number} is not `<base64> <rank>`, tiktoken's format") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise UserError(f"'{path}' is incomplete: its {len(ranks)} ranks are not 0, 1, 2, ... with all single bytes")
    return ranks


def _llama3_special_tokens(first_id: int) -> dict[str, int]:
    """Name to id of Llama 3's 256 special tokens: those with a name, the rest reserved and counted."""
    unnamed = [offset for offset in range(_LLAMA3_N_SPECIAL) if offset not in _LLAMA3_NAMED]
    reserved = {offset: f"<|reserved_special_token_{n}|>" for n, offset in enumerate(unnamed)}
    return {name: first_id + offset for offset, name in sorted({**_LLAMA3_NAMED, **reserved}.items())}


def _without_surrogates(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates, which UTF-8 has no form for, replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

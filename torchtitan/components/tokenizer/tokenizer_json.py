"""tokenizer.json, the file format of the library `tokenizers`."""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.components.tokenizer.interface import Offsets
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_regular, unreadable_file_error

if TYPE_CHECKING:
    import tokenizers

NO_BYTES = b"\xff"
"""Bytes that no text in UTF-8 has."""

_UNUSABLE = "is not a valid tokenizer of the library `tokenizers`"


@contextlib.contextmanager
def wrap_errors(path: Path, problem: str = _UNUSABLE) -> Iterator[None]:
    """Turn errors of the library `tokenizers` in the block into a `UserError` with the file and
    `problem`."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # A panic of the Rust code is not an Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise unreadable_file_error(path, f"'{path}' {problem}: {error}") from error


@contextlib.contextmanager
def suppress_native_errors(path: Path) -> Iterator[None]:
    """Like `wrap_errors`, but also discard standard error on failure, since a panic prints several
    lines there. Not thread-safe, since threads share standard error."""
    if sys.stderr is None:  # closed when Python started: its descriptor may belong to another file
        with wrap_errors(path):
            yield
        return
    with wrap_errors(path), tempfile.TemporaryFile() as captured:
        standard_error = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
        captured.seek(0)
        os.write(2, captured.read())


def replace_surrogates(text: str) -> str:
    """Join surrogate pairs, and replace lone surrogates, which UTF-8 cannot encode, with U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def byte_characters() -> list[str]:
    """Return the character that represents each byte in `tokenizers`: itself if printable, else the
    next from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unused = count(256)
    return [chr(byte if byte in printable else next(unused)) for byte in range(256)]


class HuggingFace:
    """Tokenizer of a tokenizer.json. `Tiktoken` has the same interface; `PretrainedTokenizer` uses
    either.

    Args:
        path: the file, or the one that `content` was converted from.
        content: a tokenizer.json; None: the content of `path`.
    """

    def __init__(self, path: Path, content: bytes | None = None):
        self.path = path
        self.content = read_regular(path) if content is None else content
        self.is_changed = content is not None
        vocab = self._literal.get_vocab(with_added_tokens=True)
        if not vocab:
            raise UserError(f"'{path}' has an empty vocabulary")
        self.vocab_size = max(vocab.values()) + 1

    def __getstate__(self) -> dict[str, object]:
        # A pickled `tokenizers.Tokenizer` loses `encode_special_tokens`, so the copy parses the
        # content again.
        return {
            name: self.__dict__[name] for name in ("path", "content", "is_changed", "vocab_size")
        }

    @property
    def changed_files(self) -> dict[str, bytes]:
        """Name → content of files that differ from the folder."""
        return {"tokenizer.json": self.content} if self.is_changed else {}

    def add_special_tokens(self, tokens: Sequence[str]) -> int:
        """Make `tokens` special tokens, with new ids after the last one if necessary. Return the
        number of new ids."""
        from tokenizers import AddedToken

        tokenizer = self._read()
        # Added tokens are already recognized in any text, and stay unchanged.
        present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        missing = [token for token in dict.fromkeys(tokens) if token not in present]
        new = [token for token in missing if tokenizer.token_to_id(token) is None]
        tokenizer.add_special_tokens(
            [AddedToken(token, normalized=False, special=True) for token in missing]
        )
        if [tokenizer.token_to_id(token) for token in new] != list(
            range(self.vocab_size, self.vocab_size + len(new))
        ):
            raise UserError(
                f"'{self.path}' has unused ids below its last one, so no tokens can be added"
            )
        if missing:
            # Parsed again from the content, as checkpoints are.
            self.content, self.is_changed = tokenizer.to_str(pretty=True).encode(), True
            self.vocab_size += len(new)
            for name in ("_literal", "_parsing"):
                self.__dict__.pop(name, None)
        return len(new)

    @cached_property
    def _literal(self) -> "tokenizers.Tokenizer":
        """Tokenizer that treats special tokens in a text as ordinary text."""
        return self._load(literal=True)

    @cached_property
    def _parsing(self) -> "tokenizers.Tokenizer":
        """Tokenizer that recognizes special tokens in a text; separate because switching modes is
        not thread-safe."""
        return self._load(literal=False)

    def _read(self) -> "tokenizers.Tokenizer":
        import tokenizers

        with suppress_native_errors(self.path):
            return tokenizers.Tokenizer.from_buffer(self.content)

    def as_hugging_face(self) -> "tokenizers.Tokenizer":
        """Return a new `tokenizers.Tokenizer`."""
        tokenizer = self._read()
        # Files often contain truncation and padding settings, which must not apply to documents.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _load(self, *, literal: bool) -> "tokenizers.Tokenizer":
        tokenizer = self.as_hugging_face()
        # `Tokenizer` adds BOS and EOS, and some post-processors exclude whitespace from offsets.
        self._post_processor, tokenizer.post_processor = tokenizer.post_processor, None
        tokenizer.encode_special_tokens = literal
        return tokenizer

    def added_ids(self) -> tuple[list[int], list[int]]:
        """Return the ids that the post-processor adds before and after a text."""
        with suppress_native_errors(self.path):
            encoding = self._literal.encode("a")
            processed = self._post_processor.process(encoding) if self._post_processor else encoding
        plain, full = encoding.ids, processed.ids
        start = next((i for i in range(len(full) + 1) if full[i : i + len(plain)] == plain), None)
        if start is None:
            raise UserError(f"'{self.path}' has a post_processor that omits the text")
        return full[:start], full[start + len(plain) :]

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self._literal.token_to_id(replace_surrogates(token))
        return token_id

    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]:
        return [
            encoding.ids for encoding in self._encode("encode_batch_fast", texts, allow_special)
        ]

    def tokenize_with_offsets(
        self, texts: Sequence[str], *, allow_special: bool
    ) -> list[tuple[list[int], Offsets]]:
        return [
            (encoding.ids, encoding.offsets)
            for encoding in self._encode("encode_batch", texts, allow_special)
        ]

    def _encode(
        self, method: str, texts: Sequence[str], allow_special: bool
    ) -> "list[tokenizers.Encoding]":
        tokenizer = self._parsing if allow_special else self._literal
        with wrap_errors(self.path, "cannot encode a text"):
            encodings: list[tokenizers.Encoding] = getattr(tokenizer, method)(
                [replace_surrogates(text) for text in texts], add_special_tokens=False
            )
        return encodings

    def added_tokens(self) -> dict[str, int]:
        """Return the text and the id of each special or added token."""
        return {token.content: i for i, token in self._literal.get_added_tokens_decoder().items()}

    def token_bytes(self) -> list[bytes] | None:
        """Return the bytes of each token by its id; None for tokenizers whose tokens are not pieces
        of a text's bytes. Ids without a token, and tokens that no text has, get `NO_BYTES`."""
        from tokenizers import decoders

        tokenizer = self._literal
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            return None
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        table = [NO_BYTES] * self.vocab_size
        for token, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
            if byte_of.keys() >= {*token}:
                table[token_id] = bytes(byte_of[character] for character in token)
        for text, token_id in self.added_tokens().items():
            table[token_id] = text.encode(errors="replace")
        return table

    def setting_beyond_strings(self) -> str:
        """Return a setting that makes ids depend on more than the vocabulary and the places of
        added tokens in a text; empty for a tokenizer without such a setting."""
        tokenizer = self._literal
        if getattr(tokenizer.model, "dropout", None):
            return "dropout of merges"
        added = tokenizer.get_added_tokens_decoder().values()
        texts = [token.content for token in added if token.normalized and not token.special]
        if texts and not _marks_spaces_alone(tokenizer.normalizer, texts):
            return "added tokens within normalized text"
        return ""

    def special_ids(self) -> frozenset[int]:
        added = self._literal.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        with wrap_errors(self.path, "cannot decode tokens"):
            text: str = self._literal.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def _marks_spaces_alone(normalizer: Any, texts: Sequence[str]) -> bool:
    """Return whether a normalizer does nothing, or only replaces spaces, which do not occur in
    `texts` before or after that. Then, they are in a normalized text where they are in the text
    itself."""
    if normalizer is None:
        return True
    state = json.loads(normalizer.__getstate__())
    parts = state["normalizers"] if state["type"] == "Sequence" else [state]
    is_marker = all(
        part["type"] == "Prepend"
        or part["type"] == "Replace"
        and part["pattern"] == {"String": " "}
        for part in parts
    )
    marks = {" "}.union(*(part.get("content", part.get("prepend", "")) for part in parts))
    return is_marker and not any(marks & set(text) for text in texts)

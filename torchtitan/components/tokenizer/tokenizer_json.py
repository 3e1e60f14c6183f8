"""tokenizer.json, the file format of the library `tokenizers`."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer.interface import Offsets
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import unreadable_file_error

_UNUSABLE = "is not a tokenizer that `tokenizers` can use"


@contextlib.contextmanager
def naming(path: Path, fault: str = _UNUSABLE) -> Iterator[None]:
    """Turn errors of the library `tokenizers` in the block into a `UserError` with the file and `fault`."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # A panic of its Rust code is no Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise unreadable_file_error(path, f"'{path}' {fault}: {error}") from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """As `naming`, for calls that test whether the library can use the file: their standard error, several lines for a
    panic, is dropped on failure. Not thread-safe, since threads share standard error."""
    if sys.stderr is None:  # it was closed when Python started, and its number may be another file's
        with naming(path):
            yield
        return
    with naming(path), tempfile.TemporaryFile() as kept:
        standard_error = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
        kept.seek(0)
        os.write(2, kept.read())


def without_surrogates(text: str) -> str:
    """Return `text` with surrogate pairs joined and lone surrogates, which UTF-8 cannot encode, replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class HuggingFace:
    """A file's tokenizer. `Tiktoken` has the same methods: `PretrainedTokenizer` uses either."""

    def __init__(self, path: Path):
        self.path = path
        self.content = path.read_bytes()
        self.is_changed = False
        vocab = self._literal.get_vocab(with_added_tokens=True)
        if not vocab:
            raise UserError(f"'{path}' has an empty vocabulary")
        self.vocab_size = max(vocab.values()) + 1

    def __getstate__(self) -> dict[str, Any]:
        # A pickled `tokenizers.Tokenizer` loses `encode_special_tokens`: the copy reads the content again.
        return {name: self.__dict__[name] for name in ("path", "content", "is_changed", "vocab_size")}

    @property
    def changed_files(self) -> dict[str, bytes]:
        """Name → content of the files that differ from the folder's."""
        return {self.path.name: self.content} if self.is_changed else {}

    def add_special_tokens(self, tokens: Sequence[str]) -> int:
        """Make `tokens` special tokens; new ones get ids after the last one. Return the number of new ones."""
        from tokenizers import AddedToken

        tokenizer = self._read()
        # Tokens added before are already recognized in any text, and stay unchanged.
        present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        missing = [token for token in dict.fromkeys(tokens) if token not in present]
        new = [token for token in missing if tokenizer.token_to_id(token) is None]
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in missing])
        if [tokenizer.token_to_id(token) for token in new] != list(range(self.vocab_size, self.vocab_size + len(new))):
            raise UserError(f"'{self.path}' has unused ids below its last one, so that no tokens can be added to it")
        if missing:
            # Rebuilt from the content, as by readers of the checkpoint.
            self.content, self.is_changed = tokenizer.to_str(pretty=True).encode(), True
            self.vocab_size += len(new)
            for name in ("_literal", "_parsing"):
                self.__dict__.pop(name, None)
        return len(new)

    @cached_property
    def _literal(self) -> Any:
        """Tokenizer that treats the spelling of a special token as ordinary text."""
        return self._load(literal=True)

    @cached_property
    def _parsing(self) -> Any:
        """Tokenizer that turns the spelling into the token; separate, since switching one is not thread-safe."""
        return self._load(literal=False)

    def _read(self) -> Any:
        import tokenizers

        with reading(self.path):
            return tokenizers.Tokenizer.from_buffer(self.content)

    def _load(self, *, literal: bool) -> Any:
        tokenizer = self._read()
        # Files often keep the settings of the example they were saved from, which would truncate documents.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # We add BOS and EOS ourselves, and for some models the post-processor trims white space from the offsets.
        self._post_processor, tokenizer.post_processor = tokenizer.post_processor, None
        tokenizer.encode_special_tokens = literal
        return tokenizer

    def added_ids(self) -> tuple[list[int], list[int]]:
        """Return the ids that the file puts before a text and after it."""
        with reading(self.path):
            encoding = self._literal.encode("a")
            processed = self._post_processor.process(encoding) if self._post_processor else encoding
        plain, full = encoding.ids, processed.ids
        start = next((i for i in range(len(full) + 1) if full[i : i + len(plain)] == plain), None)
        if start is None:
            raise UserError(f"'{self.path}' has a post_processor that leaves out the text itself")
        return full[:start], full[start + len(plain) :]

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self._literal.token_to_id(without_surrogates(token))
        return token_id

    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]:
        return [encoding.ids for encoding in self._encode("encode_batch_fast", texts, allow_special)]

    def tokenize_with_offsets(self, texts: Sequence[str], *, allow_special: bool) -> list[tuple[list[int], Offsets]]:
        return [(encoding.ids, encoding.offsets) for encoding in self._encode("encode_batch", texts, allow_special)]

    def _encode(self, method: str, texts: Sequence[str], allow_special: bool) -> Any:
        tokenizer = self._parsing if allow_special else self._literal
        with naming(self.path, "cannot encode a text"):
            return getattr(tokenizer, method)([without_surrogates(text) for text in texts], add_special_tokens=False)

    def special_ids(self) -> frozenset[int]:
        added = self._literal.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        with naming(self.path, "cannot decode tokens"):
            text: str = self._literal.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

"""The file format tokenizer.json, of the library `tokenizers`."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer.backend import naming, reading, without_surrogates
from torchtitan.components.tokenizer.interface import Offsets
from torchtitan.tools.errors import UserError


class HuggingFace:
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

        with reading(self.path):
            return tokenizers.Tokenizer.from_buffer(self.content)

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
        tokenizer = self._parsing if allow_special else self._literal
        plain = [without_surrogates(text) for text in texts]
        with naming(self.path, "cannot encode a text"):
            encodings = tokenizer.encode_batch_fast(plain, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def tokenize_with_offsets(self, texts: Sequence[str], *, allow_special: bool) -> list[tuple[list[int], Offsets]]:
        tokenizer = self._parsing if allow_special else self._literal
        plain = [without_surrogates(text) for text in texts]
        with naming(self.path, "cannot encode a text"):
            encodings = tokenizer.encode_batch(plain, add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def special_ids(self) -> frozenset[int]:
        added = self._literal.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        with naming(self.path, "cannot decode tokens"):
            text: str = self._literal.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

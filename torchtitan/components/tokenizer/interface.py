"""`Tokenizer`: the interface, complete except for a subclass's `tokenize` and `decode`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from torchtitan.config.configurable import Configurable
from torchtitan.tools.errors import UserError

Offsets = list[tuple[int, int]]
"""Start and end of each token's text, in characters. Each of several tokens that share a character spans all of it."""


class Tokenizer(Configurable, ABC):
    """Text to token ids and back, with BOS and EOS as in the model's own configuration. The trainer builds it as
    `config.build(path=hf_assets_path)`. A subclass sets the attributes below and defines `tokenize` and `decode`."""

    vocab_size: int
    """Largest token id plus one, including added tokens."""
    bos_id: int | None
    eos_id: int | None
    """Ids of the tokens that begin and end a text, if any."""
    adds_bos: bool
    adds_eos: bool
    """True if the model's own configuration adds them."""
    folder: Path | None = None
    """Folder of the files it was read from, which checkpoints copy. None: it has no files."""
    n_added: int = 0
    """Number of token ids added to the files' own: rows that a published model lacks."""
    fingerprint: str
    """Hexadecimal digest of everything that determines a text's ids (files, BOS and EOS, class), for cache keys."""

    @property
    def added(self) -> range:
        """Ids of the added tokens: the last ones."""
        return range(self.vocab_size - self.n_added, self.vocab_size)

    @property
    def changed_files(self) -> dict[str, bytes]:
        """Name → content of the files that differ from `folder` in checkpoints."""
        return {}

    @abstractmethod
    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]:
        """Return the token ids of each text, without BOS and EOS. `allow_special` turns text that spells a special
        token into that token. (Added tokens that the model's file does not mark as special, such as Qwen's "<think>",
        are recognized in any text.)"""

    def tokenize_with_offsets(self, texts: Sequence[str], *, allow_special: bool) -> list[tuple[list[int], Offsets]]:
        """Return ids and their character spans, for loss masks of conversations; surrogate pairs in a text are joined
        first. Raise `UserError` if a subclass does not define it."""
        raise UserError(
            f"the tokenizer {type(self).__name__} does not tell where its tokens lie in a text, which loss masks need; "
            "define its tokenize_with_offsets"
        )

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that are markers, not text."""
        return frozenset(token_id for token_id in (self.bos_id, self.eos_id) if token_id is not None)

    def id_of(self, token: str) -> int | None:
        """Return the id of the single token that `token` spells; None if it takes several."""
        [ids] = self.tokenize([token], allow_special=True)
        return ids[0] if len(ids) == 1 else None

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 (a partial character) become U+FFFD."""

    def encode(
        self, text: str, *, add_bos: bool | None = None, add_eos: bool | None = None, allow_special: bool = False
    ) -> list[int]:
        """Return the token ids of `text`; raise `UserError` if the tokenizer lacks a token to add.

        Args:
            add_bos: begin with BOS, never doubled; None: as in the model's own configuration.
            add_eos: the same for EOS at the end.
            allow_special: turn text that spells a special token, such as "<|end_of_text|>", into that token. Only for
                text composed by the program: text from others must not be able to end a document.
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
        """Return `encode` of each text, in parallel over the cores."""
        prefix = self._added("BOS", self.bos_id, self.adds_bos if add_bos is None else add_bos)
        suffix = self._added("EOS", self.eos_id, self.adds_eos if add_eos is None else add_eos)
        return [_wrap(ids, prefix, suffix) for ids in self.tokenize(texts, allow_special=allow_special)]

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of pretraining documents, in parallel over the cores; no text becomes a special token.
        Add BOS as in the model's own configuration, and EOS if there is one, since models learn from it to stop."""
        return self.encode_batch(texts, add_eos=self.eos_id is not None)

    def _added(self, name: str, token_id: int | None, add: bool) -> list[int]:
        if not add:
            return []
        if token_id is None:
            raise UserError(f"cannot add {name}: the tokenizer has none; leave add_{name.lower()} out")
        return [token_id]


def _wrap(ids: list[int], prefix: list[int], suffix: list[int]) -> list[int]:
    """Return `ids` between `prefix` and `suffix` (of at most one token), neither doubled."""
    if ids[: len(prefix)] != prefix:
        ids = prefix + ids
    return ids if not suffix or ids[len(prefix) :][-1:] == suffix else ids + suffix

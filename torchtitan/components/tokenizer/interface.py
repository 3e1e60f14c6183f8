"""`Tokenizer`, the base class of tokenizers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from torchtitan.config.configurable import Configurable
from torchtitan.tools.errors import UserError

Offsets = list[tuple[int, int]]
"""Start and end of each token's text, in characters. Tokens that share a character include all of
it."""


class Tokenizer(Configurable, ABC):
    """Converts text to token ids and back, with BOS and EOS as configured by the model. The trainer
    builds it as `config.build(path=hf_assets_path)`. Subclasses set the attributes below and define
    `tokenize` and `decode`."""

    vocab_size: int
    """Largest token id plus one, including added tokens."""
    bos_id: int | None
    eos_id: int | None
    """Ids of the tokens at the beginning and end of a text, if any."""
    adds_bos: bool
    adds_eos: bool
    """True if the model's configuration adds BOS and EOS."""
    folder: Path | None = None
    """Folder of the tokenizer's files, which checkpoints copy; None: no files."""
    n_added: int = 0
    """Number of added token ids. Published weights have no rows for them."""
    fingerprint: str
    """Hexadecimal digest of everything that affects token ids (files, BOS and EOS, class), for
    cache keys."""

    @property
    def added(self) -> range:
        """Ids of the added tokens, at the end of the vocabulary."""
        return range(self.vocab_size - self.n_added, self.vocab_size)

    @property
    def changed_files(self) -> dict[str, bytes]:
        """Name → content of the files that differ from `folder` in checkpoints."""
        return {}

    @abstractmethod
    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]:
        """Return the token ids of each text, without BOS and EOS. With `allow_special`, special
        tokens in the text are recognized. (Added tokens not marked as special in the model's file,
        such as Qwen's "<think>", always are.)"""

    def tokenize_with_offsets(
        self, texts: Sequence[str], *, allow_special: bool
    ) -> list[tuple[list[int], Offsets]]:
        """Return ids and their character spans, for loss masks of conversations; surrogate pairs
        are joined first. Raise `UserError` if not supported."""
        raise UserError(
            f"the tokenizer {type(self).__name__} does not support offsets, which loss masks need; "
            "define its tokenize_with_offsets"
        )

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        return frozenset(
            token_id for token_id in (self.bos_id, self.eos_id) if token_id is not None
        )

    def id_of(self, token: str) -> int | None:
        """Return the id of a token given as text; None if it is not a single token."""
        [ids] = self.tokenize([token], allow_special=True)
        return ids[0] if len(ids) == 1 else None

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`. Invalid UTF-8 (a partial character) becomes U+FFFD."""

    def encode(
        self,
        text: str,
        *,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        allow_special: bool = False,
    ) -> list[int]:
        """Return the token ids of `text`. Raise `UserError` if BOS or EOS should be added but does
        not exist.

        Args:
            add_bos: add BOS unless it is already there; None: as configured by the model.
            add_eos: the same for EOS.
            allow_special: recognize special tokens in the text, such as "<|end_of_text|>". Use only
                for trusted text, since other text must not be able to end a document.
        """
        return self.encode_batch(
            [text], add_bos=add_bos, add_eos=add_eos, allow_special=allow_special
        )[0]

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
        return [
            _wrap(ids, prefix, suffix) for ids in self.tokenize(texts, allow_special=allow_special)
        ]

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of pre-training documents, in parallel over the cores, without
        recognizing special tokens. Add BOS as configured by the model, and EOS if it exists, to
        learn to stop."""
        return self.encode_batch(texts, add_eos=self.eos_id is not None)

    def _added(self, name: str, token_id: int | None, add: bool) -> list[int]:
        if not add:
            return []
        if token_id is None:
            raise UserError(
                f"cannot add {name}: the tokenizer has none; set add_{name.lower()} to False"
            )
        return [token_id]


def _wrap(ids: list[int], prefix: list[int], suffix: list[int]) -> list[int]:
    """Add `prefix` and `suffix`, of at most one token each, unless already present."""
    if ids[: len(prefix)] != prefix:
        ids = prefix + ids
    return ids if not suffix or ids[len(prefix) :][-1:] == suffix else ids + suffix

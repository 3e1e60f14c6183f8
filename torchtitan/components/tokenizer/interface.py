"""`Tokenizer`: the interface, with all that follows from a subclass's `tokenize` and `decode`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from torchtitan.config.configurable import Configurable
from torchtitan.tools.errors import UserError

Offsets = list[tuple[int, int]]
"""For each token, where the text that it stands for begins and ends, in characters. Each of several tokens that share
a character spans all of it."""


class Tokenizer(Configurable, ABC):
    """Text to token ids and back, with BOS and EOS as the model's own configuration says.

    The trainer builds it as `config.build(path=hf_assets_path)`. A subclass sets the attributes below and defines
    `tokenize` and `decode`; the rest follows from them.
    """

    vocab_size: int
    """Largest token id plus one, added tokens included."""
    bos_id: int | None
    eos_id: int | None
    """Ids of the tokens that begin and end a text, if there are any."""
    adds_bos: bool
    adds_eos: bool
    """True if the model's own configuration puts them there."""
    folder: Path | None = None
    """Where the files lie that it was read from: checkpoints carry a copy of them. None: it is not made of files."""
    n_added: int = 0
    """How many of the token ids are additions to those in its files: rows that a published model does not have."""
    fingerprint: str
    """Hexadecimal digest of what decides the ids of a text (the files, BOS and EOS, the class), for a cache's key."""

    @property
    def added(self) -> range:
        """The ids that are such additions: the last ones."""
        return range(self.vocab_size - self.n_added, self.vocab_size)

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
        """The same ids with where each of them lies in the text, which loss masks of conversations need; in a text with
        surrogates, half a character each, pairs of them are joined. `UserError` where a subclass does not define it."""
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
            add_bos: whether the ids begin with BOS; None: as the model's own configuration says. Never two of them.
            add_eos: the same for EOS at the end.
            allow_special: whether text that spells a special token, say "<|end_of_text|>", becomes that token. Only for
                text that the program has put together: somebody else's must not be able to end a document.

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


def _wrap(ids: list[int], prefix: list[int], suffix: list[int]) -> list[int]:
    """`ids` that begin with `prefix` and end with `suffix` (of one token or none), neither of them doubled."""
    if ids[: len(prefix)] != prefix:
        ids = prefix + ids
    return ids if not suffix or ids[len(prefix) :][-1:] == suffix else ids + suffix

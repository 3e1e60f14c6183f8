"""What `PretrainedTokenizer` asks of a file format, and what the formats share."""

from collections.abc import Sequence
from typing import Protocol

from torchtitan.components.tokenizer.interface import Offsets


class Backend(Protocol):
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


def without_surrogates(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates, which UTF-8 has no form for, replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

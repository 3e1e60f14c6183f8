"""What `PretrainedTokenizer` asks of a file format, and what the formats share."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from torchtitan.components.tokenizer.interface import Offsets
from torchtitan.tools.errors import UserError
from torchtitan.tools.model_folder import unreadable


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


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Around calls of the library `tokenizers`: what it raises becomes a `UserError` that names the file."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # A panic of its Rust code is no Exception, and has a class that cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise unreadable(path, f"'{path}' is not a tokenizer that `tokenizers` can use: {error}") from error


def without_surrogates(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates, which UTF-8 has no form for, replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

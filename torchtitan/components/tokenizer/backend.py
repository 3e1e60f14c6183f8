"""What `PretrainedTokenizer` asks of a file format, and what the formats share."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from torchtitan.components.tokenizer.interface import Offsets
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import unreadable


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


_UNUSABLE = "is not a tokenizer that `tokenizers` can use"


@contextlib.contextmanager
def naming(path: Path, fault: str = _UNUSABLE) -> Iterator[None]:
    """Around calls of the library `tokenizers`: what it raises becomes a `UserError` of the file and `fault`."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # A panic of its Rust code is no Exception, and has a class that cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise unreadable(path, f"'{path}' {fault}: {error}") from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """As `naming`, around calls that find out whether the library can use the file: what its Rust code prints before
    they fail, several lines for a panic, is left out. Not for several threads: they share standard error."""
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
    """`text` with surrogate pairs joined and lone surrogates, which UTF-8 has no form for, replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

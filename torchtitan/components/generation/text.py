"""Start and stop tokens of a text, and incremental decoding."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torchtitan.components.chat_template.stops import template_stop_ids
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object

# tokens of the prompt that may affect the first characters of a text
_CONTEXT = 32

_UNDECODED = "�"  # replaces invalid or incomplete UTF-8


def start_id(tokenizer: Tokenizer) -> int:
    """Return the token that starts an empty text: BOS or, without BOS, EOS, which separates
    documents. Raise `UserError` if the tokenizer has neither."""
    token_id = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if token_id is None:
        raise UserError(
            "the tokenizer has neither BOS nor EOS to start an empty text; use a prompt that is "
            "not empty"
        )
    return token_id


def stop_ids(tokenizer: Tokenizer, *folders: Path) -> set[int]:
    """Return the tokens that end a text: the tokenizer's EOS, and `eos_token_id` of the first of
    `folders` that sets it, in `generation_config.json`, else in `config.json`. Raise `UserError`
    for an invalid file."""
    eos_ids = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
    for path in (
        folder / name for folder in folders for name in ("generation_config.json", "config.json")
    ):
        declared = read_object(path).get("eos_token_id")
        if declared is None:
            continue
        ids = declared if isinstance(declared, list) else [declared]
        if not all(type(token_id) is int for token_id in ids):
            raise UserError(
                f"'{path}': eos_token_id must be an id or a list of ids, not {declared!r}"
            )
        if ids:
            return eos_ids | set(ids)
    return eos_ids


def continuation_stop_ids(tokenizer: Tokenizer, folders: Sequence[Path]) -> set[int]:
    """Return the tokens that end a continuation of a text: `stop_ids`, and the stop tokens of
    the chat template in a model's folders, since a model that was trained on conversations ends its
    texts with them. Raise `UserError` as `stop_ids` and `template_stop_ids` do."""
    return stop_ids(tokenizer, *folders) | template_stop_ids(tokenizer, folders)


class StopFinder:
    """Ends a text, which comes in pieces, at the first stop string, and delays the beginning of
    one.

    Args:
        stop: strings that end the text; empty ones are ignored.
    """

    def __init__(self, stop: Iterable[str]):
        self._strings = [string for string in stop if string]
        self._pending = ""
        self.stopped = False
        """True if a stop string was found."""

    def push(self, piece: str, *, is_final: bool = False) -> str:
        """Append a piece, and return the text that belongs to no stop string; `is_final`: including
        the beginnings of stop strings, since no more follows."""
        if self.stopped:
            return ""
        text = self._pending + piece
        found = [index for index in map(text.find, self._strings) if index >= 0]
        n_released = len(text)
        if found:
            self.stopped = True
            n_released = min(found)
        elif not is_final:
            beginnings = (string[:n] for string in self._strings for n in range(1, len(string)))
            n_released -= max(
                (len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0
            )
        self._pending = text[n_released:]
        return text[:n_released]


class TextStream:
    """Incremental decoder: the concatenated pieces equal the text of all tokens decoded at once.

    Text that may still change is delayed: partial characters, and the beginning of a stop string.
    Special tokens have no text. For invalid UTF-8, a tokenizer with byte fallback decodes a
    sequence of bytes to U+FFFD, including complete characters in it; characters that were already
    returned do not change.

    Args:
        prompt: preceding tokens, which may affect a space at the beginning of the text.
        stop: strings that end the text, within or across tokens; they are not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Iterable[str] = ()):
        self._tokenizer = tokenizer
        # Decode only the new tokens, preceded by the last tokens that produced text: this takes
        # constant time per token. The preceding tokens absorb effects at the start of a text, such
        # as a removed space.
        self._window = list(prompt)
        self._n_context = len(self._window)
        self._n_decoded = len(self._decode())
        self._stops = StopFinder(stop)
        self.text = ""
        """Concatenation of all pieces so far."""

    @property
    def stopped(self) -> bool:
        """True if a stop string was found, which ends the text."""
        return self._stops.stopped

    def ends_with(self, token: int) -> bool:
        """Append a token; return whether it ends the text, as `on_token` of generation does."""
        self.push(token)
        return self.stopped

    def push(self, *tokens: int) -> str:
        """Append tokens, and return the text that can no longer change, often an empty string."""
        self._window += tokens
        text = self._decode()
        final_text = text.rstrip(_UNDECODED)
        piece = final_text[self._n_decoded :]
        self._n_decoded += len(piece)
        if piece and final_text == text:
            self._window = self._window[self._n_context :]
            self._n_context = len(self._window)
            self._n_decoded = len(self._decode())
        return self._release(piece)

    def finish(self) -> str:
        """Return the delayed text after the last token."""
        rest = self._decode()[self._n_decoded :]
        self._n_decoded += len(rest)
        return self._release(rest, is_final=True)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=True)

    def _release(self, piece: str, *, is_final: bool = False) -> str:
        released = self._stops.push(piece, is_final=is_final)
        self.text += released
        return released


class TextWriter:
    """A `TextStream` that writes some special tokens, such as marks of calls.

    Args:
        prompt: preceding tokens.
        stop: strings that end the text.
        kept: special tokens to write, with their texts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        kept: Mapping[int, str],
    ):
        self._tokenizer = tokenizer
        self._kept = kept
        self._stream = TextStream(tokenizer, prompt[-_CONTEXT:])
        self._stops = StopFinder(stop)

    @property
    def stopped(self) -> bool:
        """True if a stop string was found, which may contain special tokens that are written."""
        return self._stops.stopped

    def ends_with(self, token: int) -> bool:
        """Append a token; return whether it ends the text, as `on_token` of generation does."""
        self.push(token)
        return self.stopped

    def push(self, *tokens: int) -> str:
        """Append tokens, and return the text that can no longer change."""
        texts: list[str] = []
        for is_kept, part in itertools.groupby(tokens, self._kept.__contains__):
            if is_kept:
                texts += map(self._keep, part)
            else:
                texts.append(self._stream.push(*part))
        return self._stops.push("".join(texts))

    def _keep(self, token: int) -> str:
        """Return the rest of the text before a token, and the token's text."""
        text = self._stream.finish() + self._kept[token]
        self._stream = TextStream(self._tokenizer, [token])
        return text

    def finish(self) -> str:
        """Return the delayed text after the last token."""
        return self._stops.push(self._stream.finish(), is_final=True)

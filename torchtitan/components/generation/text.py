"""Start and stop tokens of a text, and incremental decoding."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object

_UNDECODED = "�"  # replaces bytes that are not UTF-8 (yet)


def start_id(tokenizer: Tokenizer) -> int:
    """Return the token to start an empty text: BOS, or else EOS, the border between documents. Raise `UserError` if the
    tokenizer has neither."""
    token_id = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if token_id is None:
        raise UserError("the tokenizer has neither BOS nor EOS to begin an empty text with; give a text to begin from")
    return token_id


def stop_ids(tokenizer: Tokenizer, *folders: Path) -> set[int]:
    """Return the tokens that end a text: the tokenizer's EOS, and `eos_token_id` of the first of `folders` that sets
    it, in `generation_config.json`, else in `config.json`. Raise `UserError` if such a file is malformed."""
    own = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
    for path in (folder / name for folder in folders for name in ("generation_config.json", "config.json")):
        declared = read_object(path).get("eos_token_id")
        ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
        if not all(type(token_id) is int for token_id in ids):
            raise UserError(f"'{path}' has eos_token_id {declared!r}, and must have an id or a list of ids")
        if ids:
            return own | set(ids)
    return own


class TextStream:
    """The text of a row of tokens, piece by piece: the joined pieces are the text of all tokens decoded together.

    Text that may still change is held back: partial characters, and the beginning of a stop string. Special tokens have
    no text. If tokens are not UTF-8, a tokenizer with byte fallback decodes all bytes in a row to U+FFFD, including
    whole characters among them; characters that were already returned stay.

    Args:
        prompt: preceding tokens, which may decide whether the text begins with a blank.
        stop: strings that end the text before them, within or across tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Iterable[str] = ()):
        self._tokenizer = tokenizer
        # Decoding everything for each token would cost ever more. Starting at the last tokens that had a text suffices,
        # since they absorb effects at the start of a text: a dropped blank.
        self._window = list(prompt)
        self._n_context = len(self._window)
        self._n_decoded = len(self._decode())
        self._pending = ""
        self._stops = [string for string in stop if string]
        self.text = ""
        """All pieces so far."""
        self.stopped = False
        """True once a stop string was found; nothing follows."""

    def push(self, token: int) -> str:
        """Append a token and return the text that is now certain, often none."""
        self._window.append(token)
        text = self._decode()
        certain = text.rstrip(_UNDECODED)
        fresh = certain[self._n_decoded :]
        self._pending += fresh
        self._n_decoded += len(fresh)
        if fresh and certain == text:
            self._window = self._window[self._n_context :]
            self._n_context = len(self._window)
            self._n_decoded = len(self._decode())
        return self._tell(final=False)

    def finish(self) -> str:
        """Return the text held back, once no token follows."""
        rest = self._decode()[self._n_decoded :]
        self._pending += rest
        self._n_decoded += len(rest)
        return self._tell(final=True)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=True)

    def _tell(self, *, final: bool) -> str:
        if self.stopped:
            return ""
        fresh = self._pending
        found = [place for place in (fresh.find(string) for string in self._stops) if place >= 0]
        if found:
            self.stopped = True
            fresh = fresh[: min(found)]
        elif not final:
            beginnings = (string[:n] for string in self._stops for n in range(1, len(string)))
            held_back = max((len(beginning) for beginning in beginnings if fresh.endswith(beginning)), default=0)
            fresh = fresh[: len(fresh) - held_back]
        self._pending = self._pending[len(fresh) :]
        self.text += fresh
        return fresh

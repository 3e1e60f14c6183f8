"""The tokens that begin and end a text, and the text of tokens as they come."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object

_UNDECODED = "�"  # what stands for bytes that are not UTF-8 (yet)


def start_id(tokenizer: Tokenizer) -> int:
    """The token that an empty text is continued from: BOS, or else EOS, the border between documents; `UserError`
    where the tokenizer has neither."""
    token_id = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if token_id is None:
        raise UserError("the tokenizer has neither BOS nor EOS to begin an empty text with; give a text to begin from")
    return token_id


def stop_ids(tokenizer: Tokenizer, *folders: Path) -> set[int]:
    """The tokens that end a text: the tokenizer's EOS, and all that `eos_token_id` names in the first of `folders`
    that says something, in `generation_config.json`, else in `config.json`.

    Raises:
        UserError: if such a file is not what it should be.
    """
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
    """The text of a row of tokens, piece by piece: the pieces joined are the text of all tokens decoded together.

    What may still change is held back: bytes that are a part of a character, and the beginning of a stop string.
    Special tokens have no text.

    Where tokens are not UTF-8, a tokenizer with byte fallback decodes all bytes in a row to U+FFFD, with the whole
    characters among them. Those that were whole when their last byte came have been told by then, and stay.

    Args:
        tokenizer: to decode with.
        prompt: the tokens before the first one, which may decide whether its text begins with a blank.
        stop: strings that end the text, also within and across tokens; what stands before them is the text's end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Iterable[str] = ()):
        self._tokenizer = tokenizer
        # Decoding everything for each token would cost ever more. It is enough to begin at the last tokens that had a
        # text, since they take what happens at the beginning of a text only: a blank that is dropped there.
        self._window = list(prompt)
        self._n_context = len(self._window)
        self._n_decoded = len(self._decode())
        self._pending = ""
        self._stops = [string for string in stop if string]
        self.text = ""
        """All pieces so far."""
        self.stopped = False
        """Whether a stop string was found; nothing follows then."""

    def push(self, token: int) -> str:
        """Append a token; the text that is certain now, often none."""
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
        """What was held back, once no token follows."""
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

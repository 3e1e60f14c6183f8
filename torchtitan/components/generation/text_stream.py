"""Token ids to text as they come, up to a stop string."""

from collections.abc import Iterable, Sequence

from torchtitan.components.tokenizer import Tokenizer

_UNDECODED = "�"  # what stands for bytes that are not UTF-8 (yet)


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
        self._text = ""
        self.stopped = False
        """Whether a stop string was found; nothing follows then."""

    @property
    def text(self) -> str:
        """All pieces so far."""
        return self._text

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
            fresh = fresh[: len(fresh) - self._held_back(fresh)]
        self._pending = self._pending[len(fresh) :]
        self._text += fresh
        return fresh

    def _held_back(self, text: str) -> int:
        """Characters at the end of `text` that may be the beginning of a stop string."""
        beginnings = (string[:n] for string in self._stops for n in range(1, len(string)))
        return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)

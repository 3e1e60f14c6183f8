"""Token ids to text as they come, up to a stop string."""

from collections.abc import Iterable, Sequence

from torchtitan.components.tokenizer import Tokenizer

_UNDECODED = "�"  # what stands for bytes that are not UTF-8 (yet)


class TextStream:
    """The text of a row of tokens, piece by piece: the pieces joined are the text of all tokens decoded together.

    What may still change is held back: bytes that are a part of a character, and the beginning of a stop string.
    Special tokens have no text.

    Args:
        tokenizer: to decode with.
        prompt: the tokens before the first one, which may decide whether its text begins with a blank.
        stop: strings that end the text, also within and across tokens; what stands before them is the text's end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Iterable[str] = ()):
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._told = len(self._decode())
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
        self._ids.append(token)
        return self._tell(self._decode().rstrip(_UNDECODED), final=False)

    def finish(self) -> str:
        """What was held back, once no token follows."""
        return self._tell(self._decode(), final=True)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)

    def _tell(self, text: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        fresh = text[self._told :]
        found = [place for place in (fresh.find(string) for string in self._stops) if place >= 0]
        if found:
            self.stopped = True
            fresh = fresh[: min(found)]
        elif not final:
            fresh = fresh[: len(fresh) - self._held_back(fresh)]
        self._told += len(fresh)
        self._text += fresh
        return fresh

    def _held_back(self, text: str) -> int:
        """Characters at the end of `text` that may be the beginning of a stop string."""
        beginnings = (string[:n] for string in self._stops for n in range(1, len(string)))
        return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)

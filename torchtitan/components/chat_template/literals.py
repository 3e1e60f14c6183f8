"""Values of arguments in notations like Python's calls."""

import re
from dataclasses import dataclass, replace

_WORDS = {
    **{"True": True, "true": True, "False": False, "false": False},
    **{"None": None, "null": None},
}
_WORD = re.compile(r"[A-Za-z]+")
_NUMBER = re.compile(r"-?\d+(?P<rest>\.\d+)?(?P<power>[eE][+-]?\d+)?")
_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}


class LiteralError(ValueError):
    """A text that is not a literal."""


@dataclass(frozen=True, slots=True)
class Literals:
    """Reader of values.

    Args:
        quote: text around strings besides the quotes of Python, such as Gemma 4's `<|"|>`.
        between: text between a key and its value.
        escapes: whether a backslash begins an escape in strings.
    """

    quote: str
    between: str
    escapes: bool

    def pairs(self, text: str, at: int, closing: str) -> tuple[dict[str, object], int]:
        """Return keys and values up to a closing character, and the place after it. Raise
        `LiteralError` if there is anything else."""
        found = {}
        at = skip_space(text, at)
        while not text.startswith(closing, at):
            key, at = self._key(text, at)
            found[key], at = self._value(text, at)
            at = self._next(text, at, closing)
        return found, at + len(closing)

    def _key(self, text: str, at: int) -> tuple[str, int]:
        quote = self._quote_at(text, at)
        between = ":" if quote in ("'", '"') else self.between
        if quote:
            key, at = self._string(text, at, quote, between)
        else:
            match = re.compile(rf"[^\s{re.escape(between)}()\[\]{{}},]+").match(text, at)
            if match is None:
                raise LiteralError
            key, at = match[0], match.end()
        at = skip_space(text, at)
        if not text.startswith(between, at):
            raise LiteralError
        return key, skip_space(text, at + len(between))

    def _value(self, text: str, at: int) -> tuple[object, int]:
        if quote := self._quote_at(text, at):
            return self._string(text, at, quote, ",)]}")
        # Templates write lists and objects as JSON or as Python does, whatever their texts.
        inner = replace(self, escapes=True) if self.quote in ("'", '"') else self
        if text.startswith("[", at):
            return inner._items(text, at + 1)
        if text.startswith("{", at):
            return inner.pairs(text, at + 1, "}")
        if match := _NUMBER.match(text, at):
            is_whole = not (match["rest"] or match["power"])
            return (int(match[0]) if is_whole else float(match[0])), match.end()
        match = _WORD.match(text, at)
        if match is None or match[0] not in _WORDS:
            raise LiteralError
        return _WORDS[match[0]], match.end()

    def _items(self, text: str, at: int) -> tuple[list[object], int]:
        found = []
        at = skip_space(text, at)
        while not text.startswith("]", at):
            value, at = self._value(text, at)
            found.append(value)
            at = self._next(text, at, "]")
        return found, at + 1

    def _next(self, text: str, at: int, closing: str) -> int:
        at = skip_space(text, at)
        if text.startswith(",", at):
            return skip_space(text, at + 1)
        if not text.startswith(closing, at):
            raise LiteralError
        return at

    def _quote_at(self, text: str, at: int) -> str:
        quotes = (self.quote,) if self.quote not in ("'", '"') else ("'", '"')
        return next((quote for quote in quotes if text.startswith(quote, at)), "")

    def _string(self, text: str, at: int, quote: str, following: str) -> tuple[str, int]:
        """Return a string and its end: the first quote before one of the following characters, so
        that others may stand inside it without an escape."""
        start = end = at + len(quote)
        while (end := text.find(quote, end)) >= 0:
            n_escapes = len(text[start:end]) - len(text[start:end].rstrip("\\"))
            after = skip_space(text, end + len(quote))
            is_escaped = self.escapes and n_escapes % 2 == 1
            if not is_escaped and after < len(text) and text[after] in following:
                inside = text[start:end]
                return (_ESCAPE.sub(_unescaped, inside) if self.escapes else inside), after
            end += len(quote)
        raise LiteralError


def skip_space(text: str, at: int) -> int:
    """Return the place after whitespace."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2]
    return chr(int(code, 16)) if code else _ESCAPED.get(match[3], match[3])

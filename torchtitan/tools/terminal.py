"""Output to a terminal, which shows text from files and models and never obeys it."""

import sys
import unicodedata

_BIDIRECTIONAL = "\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def visible(text: str) -> str:
    """`text` with what would control a terminal, or the direction of the text, spelled out; lines and tabs stay."""
    return text if text.isascii() and text.isprintable() else "".join(map(_visible, text))


def for_output(text: str) -> str:
    """`text` as it goes to standard output: `visible` on a terminal, and as it is in a file or a pipe."""
    return visible(text) if sys.stdout.isatty() else text


def print_error(command: str, message: object) -> None:
    """Print the message of a command's failure to standard error."""
    sys.stdout.flush()
    print(visible(f"torchtitan {command}: {message}"), file=sys.stderr)


def _visible(char: str) -> str:
    if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs") and char not in _BIDIRECTIONAL:
        return char
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else f"\\u{ord(char):04x}"

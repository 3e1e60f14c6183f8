"""The package's logger, and safe display of text from files and models on a terminal."""

import contextlib
import logging
import os
import sys
import traceback
import unicodedata
from collections.abc import Iterator
from types import TracebackType

from torchtitan.tools.errors import require
from torchtitan.tools.redact import redact

logger = logging.getLogger("torchtitan")

_COLORS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m"}
_RESET = "\033[0m"
_BIDIRECTIONAL = "\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


class _Formatter(logging.Formatter):
    """Format time, level, rank (unless 0) and message, colored by level on a terminal."""

    def __init__(self, *, colored: bool, rank: str):
        prefix = "" if rank == "0" else f"rank {rank}: "
        super().__init__(f"%(asctime)s %(levelname)s {prefix}%(message)s", datefmt="%H:%M:%S")
        self.colored = colored

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        if not getattr(record, "is_colored", False):  # colors in other text are untrusted
            line = presentable(line)
        color = _COLORS.get(record.levelno, "")
        return f"{color}{line}{_RESET}" if self.colored and color else line


class _Handler(logging.StreamHandler):
    """Write to the current `sys.stderr`, which a progress bar redirects."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def init_logger() -> None:
    """Print the package's messages on standard error: errors on every rank, others only on ranks in
    the environment variable `LOG_RANK` (comma-separated, default `0`)."""
    rank = os.environ.get("RANK", "0")
    is_printing = "RANK" not in os.environ or rank in os.environ.get("LOG_RANK", "0").split(",")
    handler = _Handler()
    handler.setFormatter(_Formatter(colored=sys.stderr.isatty(), rank=rank))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if is_printing else logging.ERROR)
    logger.propagate = False
    sys.excepthook = _print_traceback


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the traceback of a crash, whose messages may contain anything."""
    print(
        presentable("".join(traceback.format_exception(kind, error, trace))),
        end="",
        file=sys.stderr,
    )


def check_log_ranks(world_size: int) -> None:
    """Raise `UserError` if `LOG_RANK` is not a list of ranks of a run with `world_size`
    processes."""
    text = os.environ.get("LOG_RANK", "0")
    is_known = set(text.split(",")) <= {str(rank) for rank in range(world_size)}
    what = f"ranks below {world_size}, the number of processes, separated by commas"
    require(is_known, "the environment variable LOG_RANK", f"'{text}'", what)


@contextlib.contextmanager
def without_logs(up_to: int = logging.WARNING) -> Iterator[None]:
    """Suppress log messages up to a level in the block, for example while it imports libraries."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, up_to))
    try:
        yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def collected_logs() -> Iterator[list[tuple[int, str]]]:
    """Yield a list of the levels and texts of the messages that the block logs, which are not
    printed."""
    collected: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: collected.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    handlers, propagate = logger.handlers[:], logger.propagate
    logger.handlers[:], logger.propagate = [handler], False
    try:
        yield collected
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate


def presentable(text: str) -> str:
    """Return a text for a terminal, a log or a page: `visible`, and without credentials. Only the
    content of data and of answers is shown with `visible` alone."""
    return visible(redact(text))


def visible(text: str) -> str:
    """Escape characters in `text` that control a terminal or the text direction, except newlines
    and tabs."""
    return text if text.isascii() and text.isprintable() else "".join(map(_visible, text))


def for_output(text: str) -> str:
    """Return `text` for standard output: `visible` on a terminal, unchanged in a file or a pipe."""
    return visible(text) if sys.stdout.isatty() else text


def print_error(command: str, message: object) -> None:
    """Print a command's error message to standard error."""
    sys.stdout.flush()
    print(presentable(f"torchtitan {command}: {message}"), file=sys.stderr)


def _visible(char: str) -> str:
    if (
        char in "\n\t"
        or unicodedata.category(char) not in ("Cc", "Cs")
        and char not in _BIDIRECTIONAL
    ):
        return char
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else f"\\u{ord(char):04x}"

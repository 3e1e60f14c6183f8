"""The package's logger: one line per message on standard error, from rank 0 unless told otherwise."""

import logging
import os
import sys

logger = logging.getLogger("torchtitan")

_COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m"}
_RESET = "\033[0m"


class _Formatter(logging.Formatter):
    """Time, level and message; the level coloured when the stream is a terminal."""

    def __init__(self, *, coloured: bool):
        super().__init__("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
        self.coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        colour = _COLOURS.get(record.levelno, "")
        return f"{colour}{line}{_RESET}" if self.coloured and colour else line


def init_logger() -> None:
    """Let the package's messages appear on standard error.

    Only the ranks named in the environment variable `LOG_RANK` (comma-separated, default `0`) print information;
    errors are printed by every rank, with its number, since a rank that fails alone would otherwise be silent.
    """
    rank = os.environ.get("RANK", "0")
    speaks = rank in os.environ.get("LOG_RANK", "0").split(",")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(coloured=sys.stderr.isatty()))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if speaks else logging.ERROR)
    logger.propagate = False

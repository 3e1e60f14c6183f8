"""The package's logger: one line per message on standard error, from rank 0 unless told otherwise."""

import logging
import os
import sys

from torchtitan.tools.terminal import visible

logger = logging.getLogger("torchtitan")

_COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m"}
_RESET = "\033[0m"


class _Formatter(logging.Formatter):
    """Time, level, rank where it is not 0, and message; coloured by level when the stream is a terminal."""

    def __init__(self, *, coloured: bool, rank: str):
        whose = "" if rank == "0" else f"rank {rank}: "
        super().__init__(f"%(asctime)s %(levelname)s {whose}%(message)s", datefmt="%H:%M:%S")
        self.coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        if not getattr(record, "is_colored", False):  # by us: any other color would come from a stranger's text
            line = visible(line)
        colour = _COLOURS.get(record.levelno, "")
        return f"{colour}{line}{_RESET}" if self.coloured and colour else line


def init_logger() -> None:
    """Let the package's messages appear on standard error.

    Of several ranks only those named in the environment variable `LOG_RANK` (comma-separated, default `0`) print
    information; errors are printed by every rank, since one that fails alone would otherwise be silent.
    """
    rank = os.environ.get("RANK", "0")
    speaks = "RANK" not in os.environ or rank in os.environ.get("LOG_RANK", "0").split(",")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(coloured=sys.stderr.isatty(), rank=rank))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if speaks else logging.ERROR)
    logger.propagate = False

"""Stopping on request: SIGTERM and Ctrl-C end a run after the step in progress."""

import os
import signal
from types import FrameType

from torchtitan.tools.logging import logger

LAUNCHER_VARIABLE = "TORCHTITAN_LAUNCHED"
"""Set by our launcher, which turns Ctrl-C into one SIGTERM per worker: the terminal's own SIGINT is then ignored."""


COMMAND_VARIABLE = "TORCHTITAN_COMMAND"
"""Holds the command that started the run, to be shown when it stops."""


class StopRequest:
    """From construction to `close`, the first SIGTERM or SIGINT sets `received`; a second one ends the process."""

    def __init__(self) -> None:
        self.received = False
        launched = LAUNCHER_VARIABLE in os.environ
        self._previous = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._handle),
            signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN if launched else self._handle),
        }

    def close(self) -> None:
        """Give the signals back to whoever handled them before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received:
            raise KeyboardInterrupt(f"second {name}")
        self.received = True
        logger.warning("%s received: the run stops after this step (a second one ends it at once)", name)

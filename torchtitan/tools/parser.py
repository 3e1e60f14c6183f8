"""Command lines whose mistakes are reported in one line."""

import argparse
from typing import NoReturn

from torchtitan.tools.logging import visible


class Parser(argparse.ArgumentParser):
    """Parser that reports a mistake in one line, without the usage, and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, visible(f"{self.prog}: {message}; see {self.prog} --help") + "\n")

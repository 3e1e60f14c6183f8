"""Command lines whose mistakes are reported in one line."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from torchtitan.tools.errors import suggest
from torchtitan.tools.logging import presentable


class Parser(argparse.ArgumentParser):
    """Parser that reports a mistake in one line, without the usage, and exits with code 2."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: object = None) -> Any:  # type: ignore[override]
        """Parse all arguments; name the option nearest to an unknown one."""
        options, others = self.parse_known_args(args, namespace)
        if others:
            known = re.findall(r"--[\w-]+", self.format_usage())
            self.error(
                f"unrecognized argument {others[0]}{suggest(others[0].partition('=')[0], known)}"
            )
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(2, presentable(f"{self.prog}: {message}; see {self.prog} --help") + "\n")

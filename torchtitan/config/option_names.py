"""Options that do not exist, found without importing torch, which takes seconds."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torchtitan.config.registry import built_in_modules

_PACKAGE = Path(__file__).parents[1]

TABLE = _PACKAGE / "assets/options.json"
"""The options of the built-in configurations, written by `python -m tests.options_table`:
`sections` lists the options of each section once, `configurations` has the numbers of each
configuration's sections. It excludes configurations for a folder, whose options depend on it."""


class UnknownOption(NamedTuple):
    """A word of the command line, and the options that its configuration has."""

    word: str
    known: list[str]


def options_of(module: str, config: str) -> list[str] | None:
    """Return the options of a configuration, or None if the table does not have it."""
    table = json.loads(TABLE.read_text())
    configs = table["configurations"].get(module, {})
    sections = configs.get(config, configs.get(f"{module}_{config}"))
    if sections is None:
        return None
    return [option for section in sections for option in table["sections"][section]]


def certainly_unknown(module: str, config: str, words: Mapping[str, str]) -> UnknownOption | None:
    """Return the first of `words` (key → word of the command line) that no option can have, or None
    if this takes the configuration itself.

    The source may be newer than the table, so an option is unknown for certain only if a part of
    its name is nowhere in the source. Modules outside of the package may have any options.
    """
    known = options_of(module, config) if module in built_in_modules() else None
    if known is None:
        return None
    missing = [key for key in words if key not in known]
    if not missing:
        return None
    source = "\n".join(file.read_text() for file in _PACKAGE.rglob("*.py"))
    for key in missing:
        parts = [part.removeprefix("no_") for part in key.split(".")]
        if not all(re.search(rf"\b{part}\b", source) for part in map(re.escape, parts)):
            return UnknownOption(words[key], known)
    return None

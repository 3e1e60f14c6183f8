"""Regular expressions that users give to choose things by name."""

import re
from collections.abc import Iterable, Sequence

from torchtitan.tools.errors import UserError


def check_pattern(option: str, pattern: str) -> None:
    """Make sure that `pattern`, the value of `option`, is a regular expression.

    Raises:
        UserError: where it is none.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{option} '{pattern}' is no regular expression: {error}") from error


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Whether one of `patterns` is found in `name`."""
    return any(re.search(pattern, name) for pattern in patterns)


def check_matches(option: str, patterns: Sequence[str], names: Sequence[str], kind: str) -> None:
    """Make sure that each of `patterns`, the values of `option`, is found in one of `names` at least.

    Args:
        option: what the patterns were given for.
        patterns: regular expressions.
        names: what there is to choose from.
        kind: what the names are of, in the plural: "layers".

    Raises:
        UserError: naming the first pattern that is found in none, and what there is.
    """
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            there = ", ".join(without_numbers(names))
            raise UserError(f"{option} '{pattern}' matches none of the {kind}; there are: {there}")


def without_numbers(names: Iterable[str]) -> list[str]:
    """The names with `*` for each number between dots, each once: `layers.*.attention.wq`."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))

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


def check_choice(option: str, include: Sequence[str], exclude: Sequence[str], consequence: str) -> None:
    """Make sure that `include` and `exclude` are regular expressions, and that something is included.

    Args:
        option: what has both as `{option}.include` and `{option}.exclude`.
        include: what these find is chosen.
        exclude: but for what these find.
        consequence: of an empty `include`: "nothing would be converted".

    Raises:
        UserError: where they are not.
    """
    for name, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            check_pattern(f"{option}.{name}", pattern)
    if not include:
        raise UserError(f"{option}.include is empty, so that {consequence}")


def choose(option: str, include: Sequence[str], exclude: Sequence[str], names: Sequence[str], kind: str) -> list[str]:
    """Those of `names` that one of `include` is found in, and none of `exclude`.

    Args:
        option, include, exclude: as of `check_choice`.
        names, kind: as of `check_matches`.

    Raises:
        UserError: as `check_matches`.
    """
    check_matches(f"{option}.include", include, names, kind)
    check_matches(f"{option}.exclude", exclude, names, kind)
    return [name for name in names if _matches_any(include, name) and not _matches_any(exclude, name)]


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


def _matches_any(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)

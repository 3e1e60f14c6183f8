"""Regular expressions that users give to choose things by name."""

import re
from collections.abc import Iterable, Sequence

from torchtitan.tools.errors import UserError


def check_pattern(option: str, pattern: str) -> None:
    """Raise `UserError` unless `pattern`, the value of `option`, is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{option} '{pattern}' is no regular expression: {error}") from error


def check_choice(option: str, include: Sequence[str], exclude: Sequence[str], consequence: str) -> None:
    """Raise `UserError` unless `{option}.include` and `{option}.exclude` are regular expressions, and something is
    included: otherwise, in the words of the message, `consequence` ("nothing would be converted")."""
    for name, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            check_pattern(f"{option}.{name}", pattern)
    if not include:
        raise UserError(f"{option}.include is empty, so that {consequence}")


def choose(option: str, include: Sequence[str], exclude: Sequence[str], names: Sequence[str], kind: str) -> list[str]:
    """Return those of `names` that one of `{option}.include` is found in, and none of `{option}.exclude`.

    Raises:
        UserError: for the first pattern that is found in no name; `kind` is what these are of, "layers".
    """
    for option_name, patterns in ((f"{option}.include", include), (f"{option}.exclude", exclude)):
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in names):
                there = ", ".join(without_numbers(names))
                raise UserError(f"{option_name} '{pattern}' matches none of the {kind}; there are: {there}")
    return [name for name in names if _matches_any(include, name) and not _matches_any(exclude, name)]


def without_numbers(names: Iterable[str]) -> list[str]:
    """The names with `*` for each number between dots, each once: `layers.*.attention.wq`."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))


def _matches_any(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)

"""User-supplied regular expressions that select names."""

import re
from collections.abc import Callable, Iterable, Sequence

from torchtitan.tools.errors import UserError


def check_pattern(option: str, pattern: str) -> None:
    """Raise `UserError` unless `pattern`, the value of `option`, is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{option} '{pattern}' is not a regular expression: {error}") from error


def check_choice(
    option: str, include: Sequence[str], exclude: Sequence[str], consequence: str
) -> None:
    """Raise `UserError` unless `{option}.include` and `.exclude` are regular expressions, and
    something is included; the error states the `consequence` ("nothing would be converted")."""
    for name, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            check_pattern(f"{option}.{name}", pattern)
    if not include:
        raise UserError(f"{option}.include is empty, so {consequence}")


def choose(
    option: str,
    include: Sequence[str],
    exclude: Sequence[str],
    names: Sequence[str],
    kind: str,
    other_name: Callable[[str], str] = str,
) -> list[str]:
    """Return the `names` that match some `{option}.include` and no `{option}.exclude`, or whose
    `other_name` does. Raise `UserError` for the first pattern without a match; `kind` is, for
    example, "layers"."""

    def matches(pattern: str, name: str) -> bool:
        return any(re.search(pattern, text) for text in (name, other_name(name)))

    for option_name, patterns in ((f"{option}.include", include), (f"{option}.exclude", exclude)):
        for pattern in patterns:
            if not any(matches(pattern, name) for name in names):
                known = ", ".join(without_numbers(names))
                if re.fullmatch(r"\w+(,\w+)+", pattern):
                    known += f"; separate several with spaces: {pattern.replace(',', ' ')}"
                raise UserError(f"{option_name} '{pattern}' matches none of the {kind}: {known}")
    return [
        name
        for name in names
        if any(matches(pattern, name) for pattern in include)
        and not any(matches(pattern, name) for pattern in exclude)
    ]


def without_numbers(names: Iterable[str]) -> list[str]:
    """Return the distinct names with `*` for each number between dots: `layers.*.attention.wq`."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))

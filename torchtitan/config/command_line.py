"""Words of the command line: options with values, lists and switches."""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from math import inf

from torchtitan.config.configurable import describe, fits, holds_list, suggest_choice
from torchtitan.tools.errors import UserError

_BOOLEANS = {"true": True, "false": False}


def values_in(words: Sequence[str], types: Mapping[str, object]) -> dict[str, object]:
    """Return the values of options on the command line, with booleans as switches; they fit their
    types."""
    values: dict[str, object] = {}
    for key, given in _given_in(words, types).items():
        if given == ["None"] and fits(None, types[key]):
            values[key] = None
        else:
            values[key] = given if holds_list(types[key]) else given[0]
    return values | switched(words, types)


def check_words(words: Sequence[str], types: Mapping[str, object]) -> None:
    """Check the values on the command line, with the messages of a file, before tyro parses them.
    Raise `UserError` for the first wrong one."""
    for key, given in _given_in(words, types).items():
        declared = types[key]
        is_list = holds_list(declared)
        if not given and not is_list:
            raise UserError(f"--{key} has no value; it must be {described(declared)}")
        tried: object = given if is_list and given != ["None"] else given[0]
        if not fits(tried, declared):
            meant = suggest_choice(tried, declared)
            raise UserError(
                f"--{key} is {' '.join(given)!r}, but must be {described(declared)}{meant}"
            )


def unknown_words(words: Sequence[str], types: Mapping[str, object]) -> list[str]:
    """Return the words of the command line, with booleans as switches, that set no option."""
    switches = _switches(types)
    unknown = []
    n_values = 0.0  # further values that the last option takes
    for word in words:
        key = key_of(word)
        if not _is_option(word):
            n_values -= 1
        elif key not in types and key not in switches:
            n_values = -inf
        elif key in switches or "=" in word:
            n_values = 0
        else:
            n_values = inf if holds_list(types[key]) else 1
        if n_values < 0:
            unknown.append(word)
    return unknown


def switched(words: Sequence[str], types: Mapping[str, object]) -> dict[str, bool]:
    """Return the booleans that the switches on the command line set, by key."""
    switches = _switches(types)
    return dict(switches[key] for key in map(key_of, words) if key in switches)


def to_switches(args: Sequence[str], switches: Collection[str]) -> list[str]:
    """Rewrite booleans in tyro's form: `--checkpoint.enable=true` (or ` true`) becomes
    `--checkpoint.enable`, and `=false` becomes `--checkpoint.no_enable`. Raise `UserError` for
    another value after `=`."""
    words: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        option, assigned, value = word.partition("=")
        if (key := key_of(word)) not in switches:
            if "." in key and (positive := key.removeprefix("no_")) in switches:
                raise UserError(
                    f"unknown option {option}; did you mean '{_switch(positive, False)}'?"
                )
            words.append(word)
            continue
        if not assigned:
            value = rest.pop(0) if rest and not rest[0].startswith("-") else "true"
        if value.lower() not in _BOOLEANS:
            raise UserError(f"{option} is '{value}', but must be true or false")
        words.append(_switch(key, _BOOLEANS[value.lower()]))
    return words


def key_of(word: str) -> str:
    """Return the key that a word of the command line sets if there is such an option; "" for other
    words, such as a row of dashes."""
    if not re.match("--[A-Za-z]", word):
        return ""
    return spelled(word.partition("=")[0][2:])


def spelled(key: str) -> str:
    """Return a key as `key_of` does, whatever the names of a mapping in it contain."""
    return key.replace("-", "_")


def described(declared: object) -> str:
    return describe(declared).replace("null", "None")


def _given_in(words: Sequence[str], types: Mapping[str, object]) -> dict[str, list[str]]:
    """Return the words that are values of options other than switches; of an option that is
    repeated, the last ones."""
    values: dict[str, list[str]] = {}
    for place, word in enumerate(words):
        key = key_of(word)
        assigned = "=" in word
        value = word.partition("=")[2]
        if key in types and types[key] is not bool:
            rest = takewhile(lambda other: not _is_option(other), words[place + 1 :])
            values[key] = [value] if assigned else list(rest)
    return values


def _switches(types: Mapping[str, object]) -> dict[str, tuple[str, bool]]:
    """Return the option and the value that each switch sets, by the switch's key."""
    return {
        key_of(_switch(key, value)): (key, value)
        for key, declared in types.items()
        if declared is bool
        for value in (True, False)
    }


def _switch(key: str, value: bool) -> str:
    section, dot, name = key.rpartition(".")
    return f"--{key}" if value else f"--{section}{dot}no_{name}"


def _is_option(word: str) -> bool:
    """Return whether a word cannot be a value: it begins an option, or seems to."""
    is_short = re.fullmatch(r"-[A-Za-z]\S*|--", word) and not fits(word, float)
    return bool(key_of(word) or is_short)

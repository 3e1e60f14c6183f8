"""Known endings of an answer after its number. With other text, as in `4 [sic]`, the number is
a part of something else."""

import re
from fractions import Fraction

from torchtitan.components.rollout.contexts import COUNTS, ENDINGS, NEUTRAL_WORDS, NO_NOUNS
from torchtitan.components.rollout.units import is_known, is_refused

_CLOSING_MARKS = re.compile(r"(?:[\s$*_`\"”’}]|\\[)\]])*")
_BRACKET = re.compile(r"[\s$*_`]*[(\[]([^()\[\]]*)[)\]]?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’-]*(?: [A-Za-z][A-Za-z'’-]*){0,3}")
_REMARK = re.compile(rf"(?:since|because|see)\b|(?:{COUNTS}|one|zero)\Z", re.IGNORECASE)
_NO_ENDING = re.compile(
    rf"in the (?:morning|afternoon|evening|night|red|black|hole)\b|tonight\b|sharp\b|"
    rf"at (?:night|noon|dawn|dusk)\b|o['’]? ?clock\b|[ap]\.? ?m\b|GMT\b|UTC\b|[ECMP][SD]T\b|"
    rf"in (?:debt|arrears|binary|hex\w*|octal|decimal|base|(?:every )?{COUNTS})\b",
    re.IGNORECASE,
)
"""Texts that make a number a time, a debt, or digits in another base."""

_PLURALS = frozenset(
    """people men women children grandchildren feet teeth mice geese oxen sheep deer dice cattle
    police salmon trout shrimp aircraft series species kiwis taxis skis menus buses data pence
    candy change water silver money pizza paper cheese bread milk sugar flour rice gold fruit meat
    chocolate homework mph kph rpm kwh hz khz mhz ghz psi kcal cal lb lbs oz yd sq kw mw kj
    chicken""".split()
)
"""Words for counted things that do not end in `s`."""

_PLURAL = re.compile(r"\w.*(?<![sui'’])s|.*fish")
_NO_SINGULAR = re.compile(r"\w+(?:ly|ed|ing)\Z", re.IGNORECASE)


def is_known_ending(after: str, value: Fraction | None, *, is_alone: bool) -> bool:
    """Return whether the text after a number, or after a number whose value is not known, leaves it
    an answer. Fewer texts do if the number is alone, without a sentence before it."""
    marks = _CLOSING_MARKS.match(after)
    assert marks
    rest = after[marks.end() :]
    if bracket := _BRACKET.match(after):
        return _is_remark(bracket[1].strip(), value)
    if _NO_ENDING.match(rest):
        return False
    words = _WORDS.match(rest)
    if words is None:
        return True
    if "\n" in marks[0] or is_counted(words[0], value):
        return True
    return _continues(rest, is_alone)


def is_counted(phrase: str, value: Fraction | None) -> bool:
    """Return whether a phrase begins with a unit, or with the things that a number counts: words
    with a plural among them; or any noun after a number of at most 1."""
    words = phrase.split()
    if len(words) > 1 and len(words[0]) < 3 and is_known(words[1]):
        return False  # such as `m dollars`
    if is_known(words[0]) or is_known(" ".join(words[:2])):
        return True
    is_part = value is not None and abs(value) <= 1
    for word in words:
        lower = word.lower().rstrip("'’")
        if lower in NO_NOUNS or is_refused(lower):
            return False
        if lower in _PLURALS or _PLURAL.fullmatch(lower):
            return True
        if is_part and lower not in NEUTRAL_WORDS and not _NO_SINGULAR.fullmatch(lower):
            return True
        if lower in NEUTRAL_WORDS:
            return False
    return False


def _continues(rest: str, is_alone: bool) -> bool:
    if ENDINGS.match(rest):
        return True
    word = re.match(r"[A-Za-z]+(?=[\s.,;]|\Z)", rest)
    return not is_alone and word is not None and word[0].lower() in NEUTRAL_WORDS


def _is_remark(text: str, value: Fraction | None) -> bool:
    """Return whether a text in brackets after a number is its unit, its name or a reason."""
    text = text.removeprefix("in ")
    return bool(_REMARK.match(text)) or (_WORDS.match(text) is not None and is_counted(text, value))

"""Exact numbers of texts that consist of one number, with its unit, or a list of numbers."""

import re
import unicodedata
from dataclasses import dataclass, replace
from fractions import Fraction

from torchtitan.components.rollout.contexts import CHANGES_BEFORE_IT
from torchtitan.components.rollout.endings import is_counted
from torchtitan.components.rollout.units import RATE, Unit, find_factor, find_unit, is_known

MAX_CHARACTERS = 1000
"""Length of the longest answer, so that none takes long to read. Only the end of a longer text is
searched."""

_MAX_DIGITS = 500
_MAX_EXPONENT = 500  # of ten: Python would compute larger powers for minutes

_SUPERSCRIPT = re.compile("[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_DIGITS_OF_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_VULGAR_FRACTIONS = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5"}
_VULGAR_FRACTIONS |= {"⅖": "2/5", "⅗": "3/5", "⅘": "4/5", "⅙": "1/6", "⅚": "5/6"}
_VULGAR_FRACTIONS |= {"⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
_VULGAR_FRACTION = re.compile(f"([0-9]?) ?([{''.join(_VULGAR_FRACTIONS)}])")
_PLAIN_SIGNS = str.maketrans("\u2212\ufe63\uff0d\uff0b\uff1d\uff05\uff0e\u066b", "---+=%..")
_DIGIT = re.compile(r"(?![0-9])\d")
_SPACE = re.compile(
    r"[\u00a0\u2000-\u200a\u202f\u205f]|(?<!\\)\\[ ,;:]|\\q?quad\b|(?<=[\w.}])~(?=[A-Za-z\\])"
)
_IN_WORDS = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|tt)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}"
)
_CURRENCY = re.compile(r"(?<![\w$])(US\$|USD|EUR|GBP|JPY|INR) ?(?=[0-9.])(?![0-9.][^\n]*\$)")
_CURRENCY_SIGNS = {"USD": "$", "US$": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "INR": "₹"}
_APOSTROPHE = re.compile("(?<=[0-9])’(?=[0-9]{3}(?![0-9]))")
_NEGATIVE = re.compile(r"(?:negative|minus) +(?=[0-9.])", re.IGNORECASE)
ASSIGNMENT = re.compile(r"([A-Za-z](?:_\{?\w+\}?)?)\s*=\s*")

_GROUPED = "|".join(rf"[1-9][0-9]{{,2}}(?:{mark}[0-9]{{3}})+(?![0-9])" for mark in (",", " "))
_DIGITS = rf"(?:{_GROUPED}|[1-9][0-9]{{,2}}(?:'[0-9]{{3}})+(?!['\"0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_EXPONENT = r"(?:\{([+-]?[0-9]+)\}|([+-]?[0-9]+))"
_POWER = rf"(?:[eE]([+-]?[0-9]+)| ?(?:\*|×|x|\\times|\\cdot) ?10\^{_EXPONENT})"
_LATEX_FRACTION = r"\\[cdt]?frac ?(?:\{ ?(-?[0-9]+) ?\} ?\{ ?(-?[0-9]+) ?\}|([0-9])([0-9]))"
_REPEATED = r"\\(?:overline|bar) ?(?:\{ ?([0-9]+) ?\}|([0-9]))"
_FORMS = {
    "repeating": re.compile(rf"({_DIGITS}|)\.([0-9]*){_REPEATED}"),
    "latex": re.compile(rf"([0-9]*) ?{_LATEX_FRACTION}"),
    "mixed": re.compile(r"([0-9]+) ([0-9]+)/([0-9]+)"),
    "fraction": re.compile(rf"({_DECIMAL}) ?/ ?(-?{_DECIMAL})"),
    "power": re.compile(rf"10\^{_EXPONENT}"),
    "decimal": re.compile(rf"({_DECIMAL}){_POWER}?"),
}
"""Forms of a number without its sign; an earlier one matches more of a text."""

_NUMBER = "|".join(re.sub(r"(?<!\\)\((?!\?)", "(?:", form.pattern) for form in _FORMS.values())
MONEY = "$€£¥₹"
NUMBER_AT_START = re.compile(
    rf"(?P<sign>[+-]?)(?P<money>[{MONEY}]?)(?P<late>[+-]?)(?P<number>{_NUMBER})"
)


@dataclass(frozen=True)
class Number:
    """An exact number, with its unit, if any; a percentage is a number without unit."""

    value: Fraction
    unit: Unit | None = None
    variable: str = ""
    """Name of the variable that the answer gives this value, if any."""

    def equals(self, other: "Number") -> bool:
        """Return whether both are the same quantity. A unit that one of them lacks is taken from
        the other, unless the unit must be in both."""
        if self.variable and other.variable and self.variable != other.variable:
            return False
        if self.unit and other.unit:
            is_same = self.unit.measures_same(other.unit)
            return is_same and self.value * self.unit.factor == other.value * other.unit.factor
        unit = self.unit or other.unit
        return self.value == other.value and not (unit and unit.must_be_in_both)


def clean(text: str) -> str:
    """Return a text in plain characters: its digits, minus signs, spaces, fractions and
    superscripts, and LaTeX's commands for spaces, words and sizes."""
    text = text.translate(_PLAIN_SIGNS)
    text = _DIGIT.sub(lambda found: str(unicodedata.decimal(found[0])), text)
    text = _APOSTROPHE.sub("'", text)
    text = _SUPERSCRIPT.sub(_plain_power, text)
    text = _VULGAR_FRACTION.sub(_plain_fraction, text)
    text = re.sub(r"\\(?:left|right|displaystyle|!)(?![a-z])|\\!", "", text).replace("{,}", ",")
    text = _SPACE.sub(" ", _IN_WORDS.sub(r" \1 ", _SPACE.sub(" ", text)))
    text = re.sub(r"(?<=[A-Za-z]) \^(?=\{?[23])", "^", text)
    text = re.sub(r"\\([$%])", r"\1", text)
    text = _CURRENCY.sub(lambda found: _CURRENCY_SIGNS[found[1]], text)
    text = re.sub(r"<<[^<>]*>>", "", text)  # GSM8K's calculations
    text = re.sub(r"\bper cent\b", "percent", text, flags=re.IGNORECASE)
    return re.sub(r"\s*(?:\^\{?\\circ\}?|\\degree|°)", "°", text)


def _plain_power(found: re.Match[str]) -> str:
    return f"^{{{found[0].translate(_DIGITS_OF_SUPERSCRIPT)}}}"


def _plain_fraction(found: re.Match[str]) -> str:
    whole, fraction = found.groups()
    return f"{whole} {_VULGAR_FRACTIONS[fraction]}" if whole else _VULGAR_FRACTIONS[fraction]


_MARKS = (
    ("***", "***"),
    ("**", "**"),
    ("*", "*"),
    ("__", "__"),
    ("_", "_"),
    ("$$", "$$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    ("`", "`"),
    ("{", "}"),
    ('"', '"'),
    ("'", "'"),
    ("“", "”"),
    ("‘", "’"),
    ("«", "»"),
)


def unwrapped(text: str) -> str:
    """Return an answer without the marks around it: dollar signs of a formula, asterisks, a group
    of LaTeX, a final period."""
    text = text.strip()
    for opening, closing in _MARKS:
        is_marked = text.startswith(opening) and text.endswith(closing)
        if is_marked and len(text) >= len(opening + closing):
            inside = text[len(opening) : -len(closing)].strip()
            if opening != "{" or not re.search("[{},]", inside):
                text = inside
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    if text.endswith(".") and not text.endswith(".."):
        text = unwrapped(text[:-1])
    return text


def read_numbers(text: str) -> tuple[Number, ...]:
    """Return the number that a whole text is, or the numbers of a list such as `1, 2` or `(1, 2)`;
    none for other texts."""
    if len(text) > MAX_CHARACTERS:
        return ()
    plain = unwrapped(clean(text))
    variable = ""
    if match := ASSIGNMENT.match(plain):
        variable, plain = match[1], plain[match.end() :]
    plain = _NEGATIVE.sub("-", plain, count=1) if _NEGATIVE.match(plain) else plain
    if number := _whole_number(plain):
        return (replace(number, variable=variable),)
    if variable:
        return ()
    if tuple_ := re.fullmatch(r"\(([^()]*,[^()]*)\)", plain):
        parts = tuple_[1].split(",")  # `(1,234)` has two elements
    else:
        parts = re.split(r", ?", plain)
    numbers = [_whole_number(part) for part in parts]
    found = tuple(number for number in numbers if number)
    return found if len(found) == len(numbers) else ()


def _whole_number(text: str) -> Number | None:
    match = NUMBER_AT_START.match(text.strip())
    if match is None:
        return None
    rest = text.strip()[match.end() :]
    is_variable = rest[:1].isalpha() and not is_known(rest)
    is_sentence = match["number"].endswith(".") and rest.strip()
    return None if is_variable or is_sentence else number_of(match, rest.strip())


def number_of(match: re.Match[str], unit_text: str, *, in_sentence: bool = False) -> Number | None:
    """Return the number of a match of `NUMBER_AT_START` with the text of its unit; None if it has
    two signs, or if the unit changes it."""
    signs = match["sign"] + match["late"]
    value = _value_of(match["number"])
    if value is None or len(signs) > 1:
        return None
    value = -value if signs == "-" else value
    factor, unit_text = find_factor(unit_text)
    value *= factor
    unit = find_unit(unit_text) if unit_text else None
    if match["money"]:
        money = find_unit(match["money"])
        if RATE.match(rest := unit_text.lstrip(f"{MONEY} ")):
            rate = find_unit(f"{match['money']} {rest}")
            return Number(value, rate) if rate else None
        fits = not unit_text or in_sentence or unit == money
        return Number(value, money) if fits else None
    if not unit_text:
        return Number(value)
    if unit is None or not in_sentence and not _is_unit(unit_text, value):
        return None
    return Number(value, unit)


def _is_unit(text: str, value: Fraction) -> bool:
    return is_counted(text, value) and CHANGES_BEFORE_IT.search(text) is None


_DATE = re.compile(r"0[0-9] ?/ ?[0-9]{2}|[0-9]{2} ?/ ?0[0-9]")


def _value_of(text: str) -> Fraction | None:
    """Return the exact value of a number without sign; None if too large, a division by 0, or a
    fraction such as `01/02`, which may be a date."""
    if len(text) > _MAX_DIGITS or _DATE.fullmatch(text):
        return None
    for name, form in _FORMS.items():
        if match := form.fullmatch(text):
            groups = [group for group in match.groups() if group]
            try:
                return _VALUES[name](match, groups)
            except (ZeroDivisionError, OverflowError):
                return None
    return None


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub("[, ']", "", text).removesuffix("."))


def _repeating(match: re.Match[str], groups: list[str]) -> Fraction:
    whole, once, braced, single = match.groups()
    repeated = braced or single
    after = Fraction(int(repeated), 10 ** len(repeated) - 1) + int(once or 0)
    return _decimal(whole or "0") + after / 10 ** len(once)


def _power_of_ten(text: str) -> Fraction:
    exponent = int(text)
    if abs(exponent) > _MAX_EXPONENT:
        raise OverflowError
    return Fraction(10) ** exponent


def _latex(match: re.Match[str], groups: list[str]) -> Fraction:
    *whole, numerator, denominator = groups
    fraction = Fraction(int(numerator), int(denominator))
    return fraction + int(whole[0]) if whole else fraction


def _scientific(match: re.Match[str], groups: list[str]) -> Fraction:
    return _decimal(groups[0]) * (_power_of_ten(groups[1]) if len(groups) > 1 else 1)


_VALUES = {
    "repeating": _repeating,
    "latex": _latex,
    "mixed": lambda match, groups: int(groups[0]) + Fraction(int(groups[1]), int(groups[2])),
    "fraction": lambda match, groups: _decimal(groups[0]) / _signed(groups[1]),
    "power": lambda match, groups: _power_of_ten(groups[0]),
    "decimal": _scientific,
}


def _signed(text: str) -> Fraction:
    return -_decimal(text[1:]) if text.startswith("-") else _decimal(text)


def same_numbers(one: tuple[Number, ...], other: tuple[Number, ...]) -> bool:
    """Return whether two answers are equal numbers, or lists of equal numbers in one order; none
    equals nothing."""
    if not one or len(one) != len(other):
        return False
    return all(a.equals(b) for a, b in zip(one, other, strict=True))

"""Units of numbers in answers, with exact factors."""

import re
from fractions import Fraction
from typing import NamedTuple


class Unit(NamedTuple):
    """Dimension and factor of a unit; the dimension is empty for a factor without unit, such as percent. A word that is
    no known unit, such as `apples`, is a dimension of its own."""

    dimension: str
    factor: Fraction
    is_letter: bool = False
    """Whether it is a single letter, which may be a variable."""


_KNOWN: dict[str, dict[str, str]] = {
    "": {
        "%": "1/100",
        "percent": "1/100",
        "pct": "1/100",
        "per cent": "1/100",
        "hundred": "100",
        "thousand": "1000",
        "dozen": "12",
    }
    | {"million": "1000000", "billion": "1000000000", "trillion": "1000000000000"},
    "money": {"$": "1", "dollar": "1", "USD": "1", "cent": "1/100", "¢": "1/100"},
    "euro": {"€": "1", "euro": "1", "EUR": "1"},
    "pound of money": {"£": "1", "GBP": "1"},
    "yen": {"¥": "1", "yen": "1", "JPY": "1"},
    "length": {"km": "1000", "m": "1", "dm": "1/10", "cm": "1/100", "mm": "1/1000", "kilometer": "1000"}
    | {"meter": "1", "centimeter": "1/100", "millimeter": "1/1000", "kilometre": "1000", "metre": "1"}
    | {"centimetre": "1/100", "millimetre": "1/1000", "inch": "127/5000", "foot": "381/1250", "feet": "381/1250"}
    | {"ft": "381/1250", "yard": "1143/1250", "mile": "1609344/1000"},
    "area": {"km^2": "1000000", "m^2": "1", "cm^2": "1/10000", "mm^2": "1/1000000", "square meter": "1"}
    | {"square kilometer": "1000000", "square centimeter": "1/10000"},
    "volume": {"m^3": "1000", "cm^3": "1/1000", "L": "1", "l": "1", "liter": "1", "litre": "1", "mL": "1/1000"}
    | {"ml": "1/1000", "milliliter": "1/1000", "cubic meter": "1000", "cubic centimeter": "1/1000"},
    "mass": {"kg": "1", "g": "1/1000", "mg": "1/1000000", "kilogram": "1", "gram": "1/1000", "ton": "1000"}
    | {"milligram": "1/1000000"},
    "time": {"s": "1", "sec": "1", "second": "1", "min": "60", "minute": "60", "h": "3600", "hr": "3600"}
    | {"hour": "3600", "day": "86400", "week": "604800", "ms": "1/1000", "millisecond": "1/1000"},
    "speed": {"m/s": "1", "km/h": "5/18", "kilometer per hour": "5/18", "meter per second": "1"},
    "angle": {"°": "1", "degree": "1", "deg": "1"},
}
_UNITS = {name: Unit(kind, Fraction(factor)) for kind, names in _KNOWN.items() for name, factor in names.items()}

_NO_UNITS = re.compile(
    r"(?:st|nd|rd|th|and|or|to|minus|plus|times|over|divided|out|mod|modulo|choose|remainder|squared|cubed|factorial|"
    r"x|pi|sqrt|root|sin|cos|tan|log|ln|exp|alpha|beta|gamma|theta|percentage|half|halves|thirds?|quarters?|fourths?|"
    r"fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?|thousandths?|inf|infinity|nan|mil|mio|bps|"
    r"below|cannot|not|never|wrong|incorrect|false|maybe|perhaps|binary|base)",
    re.IGNORECASE,
)


def find_unit(text: str) -> Unit | None:
    """Return the unit that a text after a number is; None if the text changes the number, as in `5 or 6`, or `5x`."""
    text = re.sub(r"\^\{([23])\}", r"^\1", " ".join(text.split()))
    if unit := _known(text):
        return unit._replace(is_letter=len(text) == 1 and text.isalpha())
    words = text.split(" ")
    factor = _known(words[0])
    if len(words) > 1 and factor and not factor.dimension:
        unit = find_unit(" ".join(words[1:]))
        return unit and unit._replace(factor=unit.factor * factor.factor) if words[0] not in "%" else None
    is_plain = len(words) <= 4 and all(re.fullmatch("[A-Za-z]+", word) for word in words)
    if not is_plain or len(words[0]) < 3 or any(_NO_UNITS.fullmatch(word) for word in words):
        return None
    return Unit(" ".join(map(_singular, words)), Fraction(1))


def is_known(text: str) -> bool:
    """Return whether a text is a unit, and not only a word."""
    return _known(text) is not None


def _known(text: str) -> Unit | None:
    if text in _UNITS:
        return _UNITS[text]
    lower = " ".join(map(_singular, text.split()))
    is_word = len(lower) > 3  # the case of a symbol has a meaning
    return _UNITS.get(lower) if is_word else None


def _singular(word: str) -> str:
    lower = word.lower()
    if lower == "inches":
        return "inch"
    return lower[:-1] if len(lower) > 2 and lower.endswith("s") and not lower.endswith("ss") else lower

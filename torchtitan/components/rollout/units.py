"""Units of numbers in answers, with exact factors."""

import re
from fractions import Fraction
from typing import NamedTuple


class Unit(NamedTuple):
    """Dimension and factor of a unit; the dimension is empty for a factor without unit, such as
    percent. An unknown word, such as `apples`, is a dimension of its own, and so is a rate, such as
    `apples per box` or `per box`."""

    dimension: str
    factor: Fraction
    must_be_in_both: bool = False
    """True if a number with this unit never equals a number without one: a letter may be a
    variable, and pairs, cents and radians count in parts or multiples of what a number without a
    unit counts."""

    def measures_same(self, other: "Unit") -> bool:
        """Return whether both units are of one kind. A rate may omit what it counts."""
        one, two = sorted((self.dimension, other.dimension), key=len)
        return one == two or (one.startswith("per ") and two.endswith(f" {one}"))


_KNOWN: dict[str, dict[str, str]] = {
    "": {"%": "1/100", "percent": "1/100", "pct": "1/100", "dozen": "12", "score": "20"}
    | {"gross": "144", "hundred": "100", "thousand": "1000", "lakh": "100000", "crore": "10000000"}
    | {"million": "1000000", "billion": "1000000000", "trillion": "1000000000000"}
    | {"quadrillion": "1000000000000000"},
    "money": {"$": "1", "dollar": "1", "USD": "1", "cent": "1/100", "¢": "1/100"},
    "euro": {"€": "1", "euro": "1", "EUR": "1", "eurocent": "1/100"},
    "pound of money": {"£": "1", "GBP": "1", "pence": "1/100"},
    "yen": {"¥": "1", "yen": "1", "JPY": "1"},
    "rupee": {"₹": "1", "rupee": "1", "INR": "1"},
    "length": {"km": "1000", "m": "1", "dm": "1/10", "cm": "1/100", "mm": "1/1000"}
    | {"kilometer": "1000", "meter": "1", "centimeter": "1/100", "millimeter": "1/1000"}
    | {"kilometre": "1000", "metre": "1", "centimetre": "1/100", "millimetre": "1/1000"}
    | {"inch": "127/5000", "foot": "381/1250", "feet": "381/1250", "ft": "381/1250"}
    | {"yard": "1143/1250", "mile": "1609344/1000"},
    "area": {"km^2": "1000000", "m^2": "1", "cm^2": "1/10000", "mm^2": "1/1000000"}
    | {"square kilometer": "1000000", "square meter": "1", "square centimeter": "1/10000"},
    "volume": {"m^3": "1000", "cm^3": "1/1000", "L": "1", "l": "1", "liter": "1", "litre": "1"}
    | {"mL": "1/1000", "ml": "1/1000", "milliliter": "1/1000"}
    | {"cubic meter": "1000", "cubic centimeter": "1/1000"},
    "mass": {"kg": "1", "g": "1/1000", "mg": "1/1000000", "kilogram": "1", "gram": "1/1000"}
    | {"milligram": "1/1000000", "ton": "1000"},
    "time": {"s": "1", "sec": "1", "second": "1", "ms": "1/1000", "millisecond": "1/1000"}
    | {"min": "60", "minute": "60", "h": "3600", "hr": "3600", "hour": "3600"}
    | {"day": "86400", "week": "604800", "fortnight": "1209600"},
    "months": {"month": "1", "year": "12", "decade": "120", "century": "1200", "centurie": "1200"},
    "speed": {"m/s": "1", "km/h": "5/18", "km per hour": "5/18", "kilometer per hour": "5/18"}
    | {"meter per second": "1"},
    "angle": {"°": "1", "degree": "1", "deg": "1"},
    "angle in radians": {"rad": "1", "radian": "1"},
    "celsius": {"°C": "1", "degree celsius": "1", "celsius": "1"},
    "fahrenheit": {"°F": "1", "degree fahrenheit": "1", "fahrenheit": "1"},
}
_UNITS = {
    name: Unit(kind, Fraction(factor))
    for kind, names in _KNOWN.items()
    for name, factor in names.items()
}

_IN_BOTH = set("cent ¢ eurocent pence rad radian fortnight decade century centurie".split())
"""Known units that a reference without a unit does not mean."""

_GROUPS = re.compile(
    r"pairs?|couples?|penny|pennies|nickels?|dimes?|shillings?|guineas?|farthings?|twins?|duos?|"
    r"trios?|triplets?|triples?|doubles?|quartets?|quintets?|sextets?|septets?|octets?|nonets?|"
    r"quadruplets?|quadruples?|quintuplets?|quads?|twos|threes|fours|fives|sixes|sevens|eights|"
    r"nines|twenties|thirties|forties|fifties|grands?|reams?|quires?|brace",
    re.IGNORECASE,
)
"""Words that count several, or a part, of what a number without a unit counts."""

_NO_UNITS = re.compile(
    r"(?:st|nd|rd|th|and|or|to|nor|but|minus|plus|times|over|divided|multiplied|out|mod|modulo|"
    r"choose|remainder|squared|cubed|factorial|x|pi|sqrt|root|sin|cos|tan|sinh|cosh|tanh|arc\w+|"
    r"cot|csc|log|ln|exp|det|gcd|lcm|lim|alpha|beta|gamma|theta|percentage|percentile|half|halves|"
    r"thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?|"
    r"thousandths?|millionths?|billionths?|fold|inf|infinity|nan|mil|mille|mio|milliard|permille|"
    r"myriads?|bps|basis|ppm|ppb|something|raised|more|less|fewer|than|short|off|away|below|above|"
    r"under|approx|approximately|roughly|about|around|ish|circa|almost|nearly|least|most|minimum|"
    r"maximum|cannot|not|no|never|wrong|incorrect|false|untrue|maybe|perhaps|possibly|might|"
    r"binary|octal|hex|hexadecimal|base|negative|through|till|until|up|versus|vs|one|two|three|"
    r"four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|"
    r"january|february|march|april|may|june|july|august|september|october|november|december|"
    r"jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|noon|midnight|[ap]m|bc|ad|bce|ce)",
    re.IGNORECASE,
)

_MONEY_NAMES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
_EACH = r"(?:an?|each|every) (?=(?:second|minute|hour|day|night|week|month|year)\b)"
RATE = re.compile(rf"(?:per |/ ?|{_EACH})(?=[A-Za-z])")
"""The beginning of what a unit is divided by."""

_MONEY_RATE = re.compile(rf"\A([{''.join(_MONEY_NAMES)}]) ?{RATE.pattern}")
_PER_FACTOR = re.compile(r"\bper (?:cent|hundred|thousand|mille|million|billion|dozen)s?\b")


_POWERS = {"2": "square ", "3": "cubic "}


def find_unit(text: str) -> Unit | None:
    """Return the unit that a text after a number is; None if the text changes the number, as in
    `5 or 6`, or `5x`."""
    text = re.sub(r"\^\{([23])\}", r"^\1", " ".join(text.split()))
    text = re.sub(rf"\b{_EACH}", "per ", text)
    text = _MONEY_RATE.sub(lambda found: f"{_MONEY_NAMES[found[1]]} per ", text)
    text = re.sub(r"\A(units?)\^([23])\Z", lambda found: _POWERS[found[2]] + found[1], text)
    if unit := _known(text):
        is_letter = len(text) == 1 and text.isalpha()
        in_both = is_letter or _singular(text) in _IN_BOTH
        return unit._replace(must_be_in_both=in_both)
    text = re.sub(r"(?<=[A-Za-z]{3})/(?=[A-Za-z])", " per ", text)
    words = text.split(" ")
    is_plain = len(words) <= 4 and all(re.fullmatch("[A-Za-z]+", word) for word in words)
    is_short = len(words[0]) < 3 and not (len(words) > 1 and _known(words[0]))
    if not is_plain or is_short or any(_NO_UNITS.fullmatch(word) for word in words):
        return None
    if _PER_FACTOR.search(text):
        return None
    in_both = any(_GROUPS.fullmatch(word) or _singular(word) in _IN_BOTH for word in words)
    return Unit(" ".join(map(_singular, words)), Fraction(1), in_both)


def find_factor(text: str) -> tuple[Fraction, str]:
    """Return the factor that the first word of a text such as `thousand eggs` is, and the rest; 1
    and the text for others."""
    first, _, rest = " ".join(text.split()).partition(" ")
    factor = _known(first)
    if factor is None or factor.dimension or first == "%" and rest:
        return Fraction(1), text
    return factor.factor, rest


def is_refused(word: str) -> bool:
    """Return whether a word changes the number before it, or belongs to another one."""
    return _NO_UNITS.fullmatch(word) is not None


def is_known(text: str) -> bool:
    """Return whether a text is a unit, and not only a word."""
    return _known(text) is not None


def _known(text: str) -> Unit | None:
    if text in _UNITS:
        return _UNITS[text]
    lower = " ".join(map(_singular, text.split()))
    is_word = len(text) > 3  # the case of a symbol has a meaning
    return _UNITS.get(lower) if is_word else None


def _singular(word: str) -> str:
    lower = word.lower()
    if lower == "inches":
        return "inch"
    is_plural = len(lower) > 2 and lower.endswith("s") and not lower.endswith(("ss", "us"))
    return lower[:-1] if is_plural else lower

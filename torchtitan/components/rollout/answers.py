"""The final answer of a text, and exact numbers in it, for the rewards `number` and `math`.

A text has one answer, or none: what can be read in two ways, such as `5 or 6`, is no answer, so that it is never paid.
docs/post_training.md lists the forms.
"""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from torchtitan.components.rollout.units import Unit, find_unit, is_known

MAX_CHARACTERS = 1000
"""Length of the longest answer, so that none takes long to read. Only the end of a longer text is searched."""

_MAX_DIGITS = 500
_MAX_EXPONENT = 500  # of ten: Python would compute larger powers for minutes

_SUPERSCRIPT = re.compile("[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_DIGITS_OF_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_VULGAR_FRACTIONS = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5"}
_VULGAR_FRACTIONS |= {"⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
_VULGAR_FRACTION = re.compile(f"([0-9]?) ?([{''.join(_VULGAR_FRACTIONS)}])")
_MINUS = re.compile("[\u2212\ufe63\uff0d]")
_SPACE = re.compile(r"[\u00a0\u2000-\u200a\u202f\u205f]|(?<!\\)\\[ ,;:]|\\q?quad\b|(?<!\\)~")
_IN_WORDS = re.compile(r"\\(?:text(?:rm|bf|it)?|math(?:rm|bf)|mbox|operatorname)\s*\{([^{}]*)\}")
_BOX = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{")
_HASHES = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
_ANSWER_IS = re.compile(r"\b(?:answer|result)\b[*_ ]*(?:is|=|:)[*_ ]*:?", re.IGNORECASE)
_FILLER = re.compile(
    r"(?:[\s:*_]|(?:the|an|equal to|exactly|therefore|thus)\b|(?-i:a)(?=\s+\S))+",  # `A.` may be a choice
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\.(?=\s|$)|\n")
_REASON = re.compile(
    r",?\s+(?:because|since|as|so|which|given|where|when|if|not|rather|instead)\b|;(?=\s)", re.IGNORECASE
)
ASSIGNMENT = re.compile(r"([A-Za-z](?:_\{?\w+\}?)?)\s*=\s*")
_ASSIGNMENT_AT_END = re.compile(rf"(?<!\w){ASSIGNMENT.pattern}\$?\Z")

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_EXPONENT = r"(?:\{([+-]?[0-9]+)\}|([+-]?[0-9]+))"
_POWER = rf"(?:[eE]([+-]?[0-9]+)| ?(?:\*|×|x|\\times|\\cdot) ?10\^{_EXPONENT})"
_LATEX_FRACTION = r"\\[dt]?frac ?(?:\{ ?(-?[0-9]+) ?\} ?\{ ?(-?[0-9]+) ?\}|([0-9])([0-9]))"
_FORMS = {
    "latex": re.compile(rf"([0-9]*) ?{_LATEX_FRACTION}"),
    "mixed": re.compile(r"([0-9]+) ([0-9]+)/([0-9]+)"),
    "fraction": re.compile(rf"({_DECIMAL}) ?/ ?(-?{_DECIMAL})"),
    "power": re.compile(rf"10\^{_EXPONENT}"),
    "decimal": re.compile(rf"({_DECIMAL}){_POWER}?"),
}
"""Forms of a number without its sign; an earlier one matches more of a text."""

_NUMBER = "|".join(re.sub(r"(?<!\\)\((?!\?)", "(?:", form.pattern) for form in _FORMS.values())
_MONEY = "$€£¥"
_AT_START = re.compile(rf"(?P<sign>[+-]?)(?P<money>[{_MONEY}]?)(?P<late>[+-]?)(?P<number>{_NUMBER})")
_UNIT_AFTER = re.compile(rf"\s?(?P<unit>[%{_MONEY}]|[A-Za-zµ°]+(?:/[A-Za-z]+)?(?:\^\{{?[23]\}}?)?)")
_IN_TEXT = re.compile(rf"(?<![\w.,:/^#√|–])(?<![\w)\]}}][+-]){_AT_START.pattern}(?:{_UNIT_AFTER.pattern})?")
_BEFORE_NO_ANSWER = re.compile(
    r"(?:[-+*/×·÷^<>≤≥≠±√&|]\s*\(?|!=|[0-9]\s*:|\\(?!approx|Rightarrow|implies|therefore)(?:[A-Za-z]+(?:[_^]\{?\w+\}?)?)?|"
    r"\b(?:not|no|or|than|least|most|under|over|below|above|except|between|minus|negative|plus|times|by|never|"
    r"without|mod|modulo|log|ln|sin|cos|tan|sqrt|root|step|[0-9]\S* (?:and|to|less|\\?cdots)|half|double|triple|"
    r"twice|thrice|(?:half|halves|quarters?|thirds?|squares?|cubes?|roots?|negatives?|opposite|reciprocal|inverse|"
    r"factorial|percent|multiples?|factors?|divisors?|powers?|logarithm|complement|instead|double|triple|"
    r"(?:four|fif|six|seven|eigh|nin|ten)ths?) of|(?:all|anything|everything|nothing) but|except for|"
    r"(?:\A|is |are |be |has |have )up to|page|question|problem|chapter|exercise|equation)|"
    r"(?:\bnot|\bnever|\bcannot|\bdoubts?|n't|n’t)(?:\s+[A-Za-z]+){0,4})\s*$",
    re.IGNORECASE,
)
_AFTER_NO_ANSWER = re.compile(
    r"[!?…]|\s*(?:[-+*/×·÷^<>=≤≥≠±√\\|–:]|(?:and|or|to|out of)\b.*[0-9]|"
    r"(?:is|are|was)(?:n't|n’t| not| wrong| incorrect| false)\b|"
    r"[,(]?\s*(?:maybe|perhaps|wrong|incorrect|false|cannot|can't|can’t|below zero|in (?:binary|hex|octal|base)|"
    r"base [0-9])|\)+[-+*/×·÷^!])"
)
_EDGE_BEFORE = re.compile(r"(?:\A|[\s=≈:：,，(\[{}\"'“‘*_`$])\Z")
_EDGE_AFTER = re.compile(r"\Z|[\s.,;。，)\]}*_`$\\]|[\"'”’](?:\Z|[\s.,])")
"""What may directly precede and follow a number in a sentence: other signs, such as `⁄` or `¬`, may change it."""

_NEUTRAL_WORDS = "a an are as at because but by for he if in is it of on per she so that the they total was we".split()
"""Words after a number in a sentence that are no unit."""

_OPENING, _CLOSING = "([{", ")]}"


@dataclass(frozen=True)
class Number:
    """An exact number, with its unit, if any; a percentage is a number without unit."""

    value: Fraction
    unit: Unit | None = None
    variable: str = ""
    """Name of the variable that the answer gives this value, if any."""

    def equals(self, other: "Number") -> bool:
        """Return whether both are the same quantity. A unit that one of them lacks is taken from the other, unless it
        is a single letter, which may be a variable."""
        if self.variable and other.variable and self.variable != other.variable:
            return False
        if self.unit and other.unit:
            same_kind = self.unit.dimension == other.unit.dimension
            return same_kind and self.value * self.unit.factor == other.value * other.unit.factor
        unit = self.unit or other.unit
        return self.value == other.value and not (unit and unit.is_letter)


class Answer(NamedTuple):
    """The text of an answer, and whether it is a sentence, in which a number is searched."""

    text: str
    is_sentence: bool = False


def final_answer(text: str) -> Answer:
    """Return the answer of a text: the content of the last `\\boxed{…}`; else the rest of the last line that begins
    with `####` and is a number; else what follows the last "answer is" (or "answer:", "result is") in its sentence;
    else the whole text, as a sentence if it is long."""
    if (content := _last_box(text)) is not None:
        return Answer(content)
    for line in reversed(_HASHES.findall(text)):
        if read_numbers(line):
            return Answer(line)
    if found := list(_ANSWER_IS.finditer(text)):
        rest = text[found[-1].end() :]
        rest = rest if len(rest) <= MAX_CHARACTERS else f"{rest[:MAX_CHARACTERS]}…"
        return Answer(_clause(re.sub(rf"\A{_FILLER.pattern}", "", rest, flags=re.IGNORECASE)), is_sentence=True)
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        return Answer(f"…{text[-MAX_CHARACTERS:]}", is_sentence=True)  # no answer as a whole
    return Answer(text, is_sentence=re.search(r"\s", text) is not None)


def _last_box(text: str) -> str | None:
    starts = [match.end() for match in _BOX.finditer(text)]
    if not starts:
        return None
    depth = 1
    for place in range(starts[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[starts[-1] : place]
    return ""  # cut off: no answer


def _clause(text: str) -> str:
    """Return the first sentence of a text up to its reasons, or the formula that it begins with."""
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and (end := text.find(closing, len(opening))) > 0:
            if not re.match(r"[^.\n]*[0-9$]", text[end + len(closing) :]):
                return text[len(opening) : end]
    sentence = _SENTENCE_END.split(text, maxsplit=1)[0]
    return _REASON.split(sentence, maxsplit=1)[0].strip()


def clean(text: str) -> str:
    """Return a text in plain characters: its minus signs, spaces, fractions and superscripts, and LaTeX's commands for
    spaces, words and sizes."""
    text = _MINUS.sub("-", text)
    text = _SUPERSCRIPT.sub(lambda found: f"^{{{found[0].translate(_DIGITS_OF_SUPERSCRIPT)}}}", text)
    text = _VULGAR_FRACTION.sub(_plain_fraction, text)
    text = re.sub(r"\\(?:left|right|displaystyle|!)(?![a-z])|\\!", "", text).replace("{,}", ",")
    text = _SPACE.sub(" ", _IN_WORDS.sub(r" \1 ", text))
    text = re.sub(r"\\([$%])", r"\1", text)
    return re.sub(r"\s*(?:\^\{?\\circ\}?|\\degree|°)", "°", text)


def _plain_fraction(found: re.Match[str]) -> str:
    whole, fraction = found.groups()
    return f"{whole} {_VULGAR_FRACTIONS[fraction]}" if whole else _VULGAR_FRACTIONS[fraction]


def unwrapped(text: str) -> str:
    """Return an answer without the marks around it: dollar signs of a formula, asterisks, a final period."""
    text = text.strip()
    for opening, closing in (("**", "**"), ("$$", "$$"), (r"\(", r"\)"), (r"\[", r"\]"), ("`", "`")):
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening + closing):
            text = text[len(opening) : -len(closing)].strip()
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    if text.endswith(".") and not text.endswith(".."):
        text = unwrapped(text[:-1])
    return text


def read_numbers(text: str) -> tuple[Number, ...]:
    """Return the number that a whole text is, or the numbers of a list such as `1, 2`; none for other texts."""
    if len(text) > MAX_CHARACTERS:
        return ()
    plain = unwrapped(clean(text))
    variable = ""
    if match := ASSIGNMENT.match(plain):
        variable, plain = match[1], plain[match.end() :]
    if number := _whole_number(plain):
        return (replace(number, variable=variable),)
    if variable:
        return ()
    numbers = [_whole_number(part) for part in re.split(r", ?", plain)]
    found = tuple(number for number in numbers if number)
    return found if len(found) == len(numbers) else ()


def _whole_number(text: str) -> Number | None:
    match = _AT_START.match(text.strip())
    if match is None:
        return None
    rest = text.strip()[match.end() :]
    is_variable = rest[:1].isalpha() and not is_known(rest)
    return None if is_variable else _number(match, rest.strip())


def number_in_sentence(text: str) -> Number | None:
    """Return the last number of a text, with its unit; None if there is none, or its neighbors change its meaning."""
    text = clean(text).replace("**", " ").replace(r"\(", " ").replace(r"\)", " ")
    matches = list(_IN_TEXT.finditer(text))
    if not matches or re.search("[0-9]", text[matches[-1].end() :]):
        return None
    match = matches[-1]
    before, after = text[: match.start()], text[match.end() :]
    if before.endswith("$") and after.startswith("$"):  # a formula
        before, after = before[:-1], after[1:]
    if not _EDGE_BEFORE.search(before) or not _EDGE_AFTER.match(after) or _is_cut_or_primed(text, match):
        return None
    if is_excluded(before) or _AFTER_NO_ANSWER.match(after) or _AFTER_NO_ANSWER.match(text[match.end("number") :]):
        return None
    if re.match(r"\s*[^\W_a-zA-Z0-9]", after) or _is_in_brackets(before):
        return None
    unit = match["unit"] or ""
    if unit.isalpha() and match[0].endswith(f"{match['number']}{unit}") and not is_known(unit):
        return None
    if unit == "$" and not match["money"] and before.count("$") % 2:
        unit = ""  # the end of a formula
    number = _number(match, unit, in_sentence=True)
    assigned = _ASSIGNMENT_AT_END.search(before)
    return replace(number, variable=assigned[1]) if number and assigned else number


def _is_cut_or_primed(text: str, match: re.Match[str]) -> bool:
    """Return whether dots that stand for more digits follow a number, or a prime, which is no closing quote."""
    end = match.end("number")
    if ".." in text[end - 1 : end + 2]:
        return True
    quote = text[end : end + 1]
    openings = {"'": "'‘", '"': '"“'}.get(quote, "")
    return bool(openings) and not any(opening in text[: match.start()] for opening in openings)


def is_excluded(before: str) -> bool:
    """Return whether the end of a text, such as `not`, changes the meaning of what follows."""
    return _BEFORE_NO_ANSWER.search(before) is not None


def _is_in_brackets(before: str) -> bool:
    """Return whether a number that follows `before` is an argument, or one of the elements of a list in brackets."""
    depth = 0
    for place in range(len(before) - 1, -1, -1):
        if before[place] in _CLOSING:
            depth += 1
        elif before[place] in _OPENING:
            depth -= 1
            if depth < 0:
                inside, outside = before[place + 1 :], before[:place]
                return bool(re.search("[0-9,;]", inside) or re.search(r"[-+*/^\w}\])]$", outside))
    return False


def _number(match: re.Match[str], unit_text: str, *, in_sentence: bool = False) -> Number | None:
    signs = match["sign"] + match["late"]
    value = _value_of(match["number"])
    if value is None or len(signs) > 1:
        return None
    value = -value if signs == "-" else value
    if in_sentence and unit_text.lower() in _NEUTRAL_WORDS:
        unit_text = ""
    if match["money"]:
        if unit_text and not in_sentence and find_unit(unit_text) != find_unit(match["money"]):
            unit = find_unit(unit_text)
            if unit is None or unit.dimension:
                return None
            return Number(value * unit.factor, find_unit(match["money"]))
        return Number(value, find_unit(match["money"]))
    if not unit_text:
        return Number(value)
    unit = find_unit(unit_text)
    if unit is None:
        return None
    if not unit.dimension:  # percent, or thousand
        return Number(value * unit.factor)
    return replace(Number(value), unit=unit)


def _value_of(text: str) -> Fraction | None:
    """Return the exact value of a number without sign; None if it is too large, or a division by 0."""
    if len(text) > _MAX_DIGITS:
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
    return Fraction(re.sub("[, ]", "", text).removesuffix("."))


def _power_of_ten(text: str) -> Fraction:
    exponent = int(text)
    if abs(exponent) > _MAX_EXPONENT:
        raise OverflowError
    return Fraction(10) ** exponent


def _latex(match: re.Match[str], groups: list[str]) -> Fraction:
    *whole, numerator, denominator = groups
    fraction = Fraction(int(numerator), int(denominator))
    return fraction + int(whole[0]) if whole else fraction


_VALUES = {
    "latex": _latex,
    "mixed": lambda match, groups: int(groups[0]) + Fraction(int(groups[1]), int(groups[2])),
    "fraction": lambda match, groups: _decimal(groups[0]) / _signed(groups[1]),
    "power": lambda match, groups: _power_of_ten(groups[0]),
    "decimal": lambda match, groups: _decimal(groups[0]) * (_power_of_ten(groups[1]) if len(groups) > 1 else 1),
}


def _signed(text: str) -> Fraction:
    return -_decimal(text[1:]) if text.startswith("-") else _decimal(text)


def numbers_of(answer: Answer) -> tuple[Number, ...]:
    """Return the number of an answer, or the numbers of a list; none if it has no single reading."""
    numbers = read_numbers(answer.text)
    if numbers or not answer.is_sentence:
        return numbers
    number = number_in_sentence(answer.text)
    return () if number is None else (number,)


def same_numbers(one: tuple[Number, ...], other: tuple[Number, ...]) -> bool:
    """Return whether two answers are equal numbers, or lists of equal numbers in one order; none equals nothing."""
    if not one or len(one) != len(other):
        return False
    return all(a.equals(b) for a, b in zip(one, other, strict=True))

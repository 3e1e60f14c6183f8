"""The number that a sentence gives as its answer.

It is the last number of a text. The number is not an answer next to another number, or with a word
or a sign that may change its meaning, such as `not` in its clause or `half of` before it."""

import ast
import re
from dataclasses import replace
from fractions import Fraction

from torchtitan.components.rollout.contexts import (
    AFTER_NO_ANSWER,
    CAPITAL,
    CHANGES_BEFORE_IT,
    CHANGES_CLAUSE,
    EXCLUDES,
    NEUTRAL_WORDS,
    NEW_CLAUSE,
    NO_CHANGE,
    NO_LABEL,
    RETRACTS,
)
from torchtitan.components.rollout.endings import is_known_ending
from torchtitan.components.rollout.exact_numbers import (
    ASSIGNMENT,
    MONEY,
    NUMBER_AT_START,
    Number,
    clean,
    number_of,
    read_numbers,
    unwrapped,
)
from torchtitan.components.rollout.units import RATE, is_known

_WORD_OF_UNIT = r"(?:square |cubic )?[A-Za-zµ]+(?: (?i:celsius|fahrenheit))?"
UNIT_AFTER = re.compile(
    rf"\s?(?P<unit>%|(?!/){RATE.pattern}[A-Za-z]+|(?:[{MONEY}]|{_WORD_OF_UNIT}|°[CF]?(?![A-Za-z]))"
    rf"(?:/[A-Za-z]+| (?!/){RATE.pattern}[A-Za-z]+)?(?:\^\{{?[23]\}}?)?)"
)
"""A space, and the unit of the number before it."""

_IN_TEXT = re.compile(
    rf"(?<![\w.,:/^#√|–])(?<![\w)\]}}][+-]){NUMBER_AT_START.pattern}(?:{UNIT_AFTER.pattern})?"
)
_ASSIGNMENT_AT_END = re.compile(rf"(?<!\w){ASSIGNMENT.pattern}\$?\Z")

_EDGE_BEFORE = re.compile(r"(?:\A|[\s=:：,，(\[{}*_`$]|(?:\A|[\s(])[\"'“‘])\Z")
_EDGE_AFTER = re.compile(r"\Z|[\s.,;。，)\]}*_`$\\]|[\"'”’](?:\Z|[\s.,])")
"""Text that may directly precede and follow a number. Other signs, such as `⁄` or `¬`, may change
it."""

_SIGN_BEFORE = re.compile(r"(?:\A|[A-Za-z0-9=:：,，.;(\[{}\])\"'“”‘’*_`$%°⇒→∴]|[!?]\s)\s*\Z")
_SIGN_AFTER = re.compile(r"\s*(?:\Z|[A-Za-z0-9.,;:。，(\[)\]}*_`$\"'”’\\])")
"""The same for signs that spaces separate from the number."""

_MORE = re.compile(
    r"\A(\s?)(?:more|extra|additional|other|whole|full)"
    r"(?: (?=[A-Za-z]{3})(?!than\b)|(?=[.,]?\s*\Z))"
)
_ARGUMENT = r"[-+*/^\w}\])]$|[^\x00-\x7f]\s*$"
_OPENING, _CLOSING = "([{", ")]}"

_FORMULA_AT_END = re.compile(
    r"(?:\\(?:times|cdot|div|angle|alpha|beta|gamma|theta|sqrt|[dt]?frac)(?![a-zA-Z])|[0-9]|"
    r"(?<![A-Za-z\\'’])[A-Za-z](?![A-Za-z])|[.,](?=[0-9])|[-+*/×·÷()$%=^_{}]|"
    r"(?<=[-+*/×·÷()$%=^_{}\w]) )*\Z"
)
_VARIABLE = re.compile(
    r"\s*(?:m?\\angle |\\angle\s*)?(?:[A-Za-z]|\\(?:alpha|beta|gamma|theta))"
    r"(?:_\{?\w+\}?)?(?:\([^()=]*\))?\s*"
)
_BEFORE_FORMULA = re.compile(
    r"(?:[.,:;\n⇒→*_#]|\b(?:is|are|get|gets|have|has|so|thus|then|hence|therefore|that))\s*\Z",
    re.IGNORECASE,
)


_IN_A_SET = re.compile(r"\\(?:not)?in(?![A-Za-z])|[∈∉]")
"""Signs before a set or an interval, whose bounds are no answers."""


def number_in_sentence(text: str) -> Number | None:
    """Return the last number of a text, with its unit; None for a text without a number, or if the
    number's neighbors change its meaning."""
    text = unwrapped(clean(text)).replace("**", " ")
    text = re.sub(r"\\[()\[\]]", " ", text)
    if _IN_A_SET.search(text):
        return None
    matches = list(_IN_TEXT.finditer(text))
    if not matches or re.search("[0-9]", text[matches[-1].end() :]):
        return None
    match = matches[-1]
    before, after = text[: match.start()], text[match.end() :]
    unit = match["unit"] or ""
    if more := _MORE.match(text[match.end("number") :]):
        rest = more[1] + text[match.end("number") + more.end() :]
        noun = UNIT_AFTER.match(rest)
        unit, after = (noun["unit"], rest[noun.end() :]) if noun else ("", rest)
        after = re.sub(r"\A than\b", "", after)
    elif unit.lower() in NEUTRAL_WORDS:
        unit, after = "", text[match.end("number") :]
    if before.endswith("$") and after.startswith("$"):  # a formula
        before, after = before[:-1], after[1:]
    if not _stands_alone(text, match, before, after):
        return None
    previous, line = ["", *before.split("\n")][-2:]
    if not line.strip() and read_numbers(previous):
        return None  # an element of a list
    if is_excluded(before) or is_changed_by(text[match.end("number") :], after):
        return None
    is_attached = unit.isalpha() and match[0].endswith(f"{match['number']}{unit}")
    if is_attached and not is_known(unit):
        return None
    if unit == "$" and not match["money"] and before.count("$") % 2:
        unit = ""  # the end of a formula
    number = number_of(match, unit, in_sentence=True)
    if number is None or not is_equal_to_all(before, number):
        return None
    value = Fraction(1) if match["money"] else number.value  # any noun may follow money
    is_alone = re.search(r"[^\s$*_`=:]", before) is None
    if not is_known_ending(text[match.end("number") :], value, is_alone=is_alone):
        return None
    if after.lstrip()[:1] in ("(", "[") and not is_known_ending(after, value, is_alone=is_alone):
        return None
    assigned = _ASSIGNMENT_AT_END.search(before)
    return replace(number, variable=assigned[1]) if assigned else number


def _stands_alone(text: str, match: re.Match[str], before: str, after: str) -> bool:
    """Return whether a number is neither part of a larger expression nor an element of a list."""
    if not _EDGE_BEFORE.search(before) or not _EDGE_AFTER.match(after):
        return False
    if not _SIGN_BEFORE.search(before) or not _SIGN_AFTER.match(after):
        return False
    return not _is_cut_or_primed(text, match) and not _is_in_brackets(before)


def _is_cut_or_primed(text: str, match: re.Match[str]) -> bool:
    """Return whether a number is followed by dots that represent more digits, or by a prime that is
    not a closing quote."""
    end = match.end("number")
    if ".." in text[end - 1 : end + 2]:
        return True
    quote = text[end : end + 1]
    openings = {"'": "'‘", '"': '"“'}.get(quote, "")
    return bool(openings) and not any(opening in text[: match.start()] for opening in openings)


def is_excluded(before: str) -> bool:
    """Return whether the end of a text, such as `not` in its last clause, changes the meaning of
    the text after it."""
    if EXCLUDES.search(before):
        return True
    if (label := CAPITAL.search(before)) and (label[1] or label[2]) not in NO_LABEL:
        return True
    return _changes_clause(before)


def _changes_clause(before: str) -> bool:
    """Return whether the last clause of a text negates the text after it, or makes it a
    condition."""
    before = NO_CHANGE.sub(" ", before)
    starts = [found.end() for found in NEW_CLAUSE.finditer(before.rstrip(" =:$("))]
    return CHANGES_CLAUSE.search(before[starts[-1] if starts else 0 :]) is not None


def is_changed_by(after: str, after_unit: str) -> bool:
    """Return whether the text after a number, or after its unit, changes its meaning."""
    if AFTER_NO_ANSWER.match(after) or AFTER_NO_ANSWER.match(after_unit):
        return True
    sentence = re.split(r"\.(?=\s|\Z)|\n", after_unit, maxsplit=1)[0]
    return bool(CHANGES_BEFORE_IT.search(sentence) or retracts(after_unit))


def retracts(text: str) -> bool:
    """Return whether a text retracts the statement before it."""
    return RETRACTS.search(text) is not None


def _is_in_brackets(before: str) -> bool:
    """Return whether a number that follows `before` is an argument, or one of the elements of a
    list in brackets."""
    depth = 0
    for place in range(len(before) - 1, -1, -1):
        if before[place] in _CLOSING:
            depth += 1
        elif before[place] in _OPENING:
            depth -= 1
            if depth < 0:
                inside, outside = before[place + 1 :], before[:place]
                return bool(re.search("[0-9,;]", inside) or re.search(_ARGUMENT, outside))
    return False


def is_equal_to_all(before: str, number: Number, *, is_box: bool = False) -> bool:
    """Return whether everything before the equals signs directly before a number may equal it: in
    `x = 5 = 4`, 5 does not, and in `2x = 4` the number is not the value of a variable. A number in
    a box may be the value of an expression of several variables, or of none."""
    before = re.sub(r"(?<=[0-9]) x (?=[0-9$])", " * ", before.rstrip(f" {MONEY}"))
    if not before.endswith("="):
        return True
    formula = _FORMULA_AT_END.search(before)
    assert formula
    start, *parts, _ = formula[0].split("=")
    prose = before[: formula.start()]
    if (
        not start.strip()
        and prose
        and not re.search(r"[A-Za-z]{2}\s*[*:]*\s*\Z|[.,:;]\s*\Z", prose)
    ):
        return False  # such as `|x| = 4`
    if not start.strip() and re.search(r"(?<![A-Za-z0-9])(?<![0-9] )[a-z]{2}\s*\Z", prose):
        return not re.search(r"(?<![A-Za-z])(?!is|be)[b-df-hj-np-tv-z][a-z]\s*\Z", prose)
    if re.search("[A-Za-z]", re.sub(r"\\(?:times|cdot|div|[dt]?frac)", "", start)):
        name = _VARIABLE.fullmatch(start.replace("$", ""))
        letters = set(re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", start)))
        is_expression = is_box and name is None and len(letters) != 1
        if is_expression:
            return all(
                value is None or value.equals(number) for value in map(_value_of_part, parts)
            )
        if name is None or _is_function(prose) or any(name[0].strip() in part for part in parts):
            return False
    if prose.strip() and not _BEFORE_FORMULA.search(prose):
        start = ""  # such as the end of `50% of 8`
    values = [_value_of_part(part) for part in (start, *parts)]
    return all(value is None or value.equals(replace(number, variable="")) for value in values)


def _is_function(prose: str) -> bool:
    words = r"log|ln|sin|cos|tan|sqrt|root|of|twice|half|double|triple|minus|plus|times|negative"
    return re.search(rf"\b(?:{words})\s*\Z", prose, re.IGNORECASE) is not None


def _value_of_part(text: str) -> Number | None:
    """Return the value of a number, or of sums, products and quotients of numbers."""
    text = text.strip(" $") if text.count("$") != 1 else text.strip()
    if not re.search("[0-9]", text):
        return None
    if numbers := read_numbers(text):
        return numbers[0] if len(numbers) == 1 else None
    text = re.sub(r"×|·|\\times|\\cdot", "*", re.sub(r"÷|\\div", "/", text))
    text = re.sub(rf"[{MONEY}\s]|(?<=[0-9]),(?=[0-9]{{3}})", "", text).lstrip("0 ")
    if len(text) > 200 or not re.fullmatch(r"[-+*/().0-9]+", text) or "**" in text or "//" in text:
        return None
    try:
        return Number(_computed(ast.parse(text, mode="eval").body, text))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _computed(node: ast.expr, text: str) -> Fraction:
    """Return the exact value of a node of an arithmetic expression."""
    if isinstance(node, ast.Constant):
        return Fraction(text[node.col_offset : node.end_col_offset].removesuffix("."))
    if isinstance(node, ast.UnaryOp):
        value = _computed(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp):
        raise ValueError("no arithmetic")
    left, right = _computed(node.left, text), _computed(node.right, text)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case _:
            return left / right

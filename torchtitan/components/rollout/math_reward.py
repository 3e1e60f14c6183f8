"""The reward `math`: equality of answers that are numbers, quantities, times, lists, intervals,
words or formulas."""

import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torchtitan.components.rollout import math_process
from torchtitan.components.rollout.answers import Answer, final_answer
from torchtitan.components.rollout.exact_numbers import (
    ASSIGNMENT,
    MAX_CHARACTERS,
    Number,
    clean,
    read_numbers,
    same_numbers,
    unwrapped,
)
from torchtitan.components.rollout.sentences import is_excluded, number_in_sentence
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_SECONDS = 5.0
"""Processor time of a comparison of two formulas."""

_MAX_FORMULA = 300  # characters

_TIME = re.compile(r"([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?\s*(?:([ap])\.?m\.?)?", re.IGNORECASE)
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’ -]*")
_RELATION = re.compile(r"[<>=≤≥≠≈∈]|\\(?:leq?|geq?|neq?|lt|gt|in|approx|sim|equiv|to)(?![A-Za-z])")
_UNION = re.compile(r"\\cup(?![A-Za-z])|∪")
_FORMULA_AT_END = re.compile(r"(?:\$([^$]+)\$|\\\(([^$]+?)\\\))[\s.]*\Z")

_SYMBOLS = "pi|alpha|beta|gamma|delta|epsilon|theta|lambda|mu|phi|omega|rho|sigma|tau"
_COMMANDS = (
    r"\\(?:[dt]?frac|sqrt|cdot|times|div|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log|"
    rf"exp|infty|binom|{_SYMBOLS}|"
    r"begin\{[pbv]?matrix\}|end\{[pbv]?matrix\}|\\)"
    r"(?![A-Za-z])"
)
_TOKENS = (
    rf"(?:{_COMMANDS}|(?:sqrt|sin|cos|tan|ln|log|exp|pi)(?![A-Za-z])|[A-Za-z](?![A-Za-z])|[0-9]"
)
_FORMULA = re.compile(rf"{_TOKENS}|[-+*/^_().{{}}!|&\[\]\s])+")
_AMBIGUOUS = re.compile(
    r"[0-9][eE][-+]?[0-9]|[0-9]\s*\\[dt]?frac|[0-9]\s+[0-9]|[-+*/^.]\s*[*/^.]|/[^-+]*/|[0-9}]\s*_|"
    r"(?<![0-9])(?:[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}|[0-9]{1,2}-[0-9]{1,2}-[0-9]{4})(?![0-9])|"
    r"(?<![0-9.])(?:0[0-9]\s*/\s*[0-9]{2}|[0-9]{2}\s*/\s*0[0-9])(?![0-9])|"
    r"(?<![\\A-Za-z])[A-Za-z]\s*[0-9]|\)\s*[0-9]|"
    rf"\\(?:{_SYMBOLS})\s*[0-9]|"
    r"\\(?:[dt]?frac\s*[0-9]{3}|sqrt\s*[0-9]{2})|"
    r"(?:\\sqrt(?:\[[^\]]*\])?|\\[dt]?frac\s*\{[^{}]*\}|\^)\s*\{[^{}]*\}\s*[0-9]"
)
"""Powers of ten or products with e; mixed fractions or products; digits without an operator; two
divisions; numbers in another base, which math-verify reads as decimal; dates; a digit after a
letter, a symbol, a bracket, a root, a fraction or an exponent: a product, or an index or exponent
that has lost its sign; digits after `\\frac` or `\\sqrt`: LaTeX takes only the first ones."""

Kind = Literal["numbers", "time", "words", "list", "formula", "other"]
Check = Callable[[str, str], bool]


_List = tuple[str, str, "list[_Reading]"]
"""Opening and closing bracket, and elements."""


@dataclass(frozen=True)
class _Reading:
    kind: Kind
    value: Any
    variable: str = ""


class MathReward:
    """Return 1 if the answers of completion and reference are equal, else 0. Formulas are compared
    by math-verify, in a process of its own that is ended after some seconds of processor time; a
    comparison without result counts as unequal."""

    def __init__(self, seconds: float = _SECONDS):
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("math needs the package math-verify: pip install 'torchtitan[math]'")
        self._seconds, self._lock = seconds, threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.n_ended = 0

    def __call__(self, gold: str, completion: str) -> float:
        return float(same_answers(gold, completion, self._equal_formulas))

    def _equal_formulas(self, gold: str, answer: str) -> bool:
        with self._lock:
            process = self._process or self._start()
            assert process.stdin and process.stdout
            try:
                process.stdin.write(json.dumps([self._seconds, gold, answer]) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            if line:
                return bool(json.loads(line))
            self.close()
            self.n_ended += 1
            if self.n_ended == 1:
                what = f"{gold[:60]!r} with {answer[:60]!r}"
                logger.warning(
                    "--rewards math: comparing %s took too long; such answers count as unequal",
                    what,
                )
            return False

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", str(Path(math_process.__file__))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process: subprocess.Popen[str] = subprocess.Popen(
            command, text=True, encoding="utf-8", **pipes
        )  # type: ignore[call-overload]
        assert process.stdout
        if failure := json.loads(process.stdout.readline() or '"it ended at its start"'):
            process.kill()
            process.wait()
            raise UserError(f"math-verify cannot be used: {failure}")
        self._process = process
        return process

    def close(self) -> None:
        """End the process; a later comparison starts another."""
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None


def same_answers(gold: str, completion: str, check: Check) -> bool:
    """Return whether the final answers of two texts are equal; `check` compares two formulas in
    LaTeX."""
    return _same(_read_answer(final_answer(gold)), _read_answer(final_answer(completion)), check)


def _read_answer(answer: Answer) -> _Reading:
    """Read an answer; of a sentence that is none as a whole, the formula at its end, or else its
    last number."""
    whole = _read(answer.text)
    if not answer.is_sentence or not _has_prose(whole):
        return whole
    match = _FORMULA_AT_END.search(answer.text)
    if match is not None and not is_excluded(answer.text[: match.start()]):
        formula = _read(match[1] or match[2])
        if formula.kind not in ("numbers", "other"):
            return formula
    number = number_in_sentence(answer.text)
    return whole if number is None else _Reading("numbers", (number,))


def _has_prose(reading: _Reading) -> bool:
    if reading.kind != "list":
        return reading.kind == "other"
    opening, _, elements = reading.value
    words = [element.value for element in elements if element.kind in ("words", "other")]
    return not opening and any(re.search("[A-Za-z]{2}", word) for word in words)


def _read(text: str) -> _Reading:
    if len(text) > MAX_CHARACTERS + 1:
        return _Reading("other", "")
    plain = unwrapped(clean(text)).replace("π", r"\pi ").strip()
    variable = ""
    if (match := ASSIGNMENT.match(plain)) and not _RELATION.search(plain[match.end() :]):
        variable, plain = match[1], plain[match.end() :].strip()
    kind, value = _kind_of(plain)
    if kind == "numbers":
        value = tuple(replace(number, variable=variable) for number in value)
    return _Reading(kind, value, variable)


def _kind_of(text: str) -> tuple[Kind, Any]:
    if (numbers := read_numbers(text)) and len(numbers) == 1:
        return "numbers", numbers
    if match := _TIME.fullmatch(text):
        return "time", _minutes(match)
    if parts := _UNION.split(text)[1:] and _UNION.split(text):
        return "list", ("union", "", [_read(part) for part in parts])
    if found := _elements(text):
        opening, closing, elements = found
        if opening == "(" and len(elements) == 1:
            return _kind_of(elements[0].strip())
        return "list", (opening, closing, [_read(element) for element in elements])
    if _WORDS.fullmatch(text):
        return "words", _folded(text)
    is_short = len(text) <= _MAX_FORMULA and re.search("[A-Za-z0-9]", text)
    if is_short and _FORMULA.fullmatch(text) and not _AMBIGUOUS.search(text):
        return "formula", _latex(text)
    return "other", re.sub(r"\s+", "", _SYNONYM.sub(lambda found: _SYNONYMS[found[0]], text))


_SYNONYMS = {r"\leq": "≤", r"\le": "≤", r"\leqslant": "≤", "<=": "≤", r"\lt": "<"}
_SYNONYMS |= {r"\geq": "≥", r"\ge": "≥", r"\geqslant": "≥", ">=": "≥", r"\gt": ">"}
_SYNONYMS |= {r"\neq": "≠", r"\ne": "≠", "!=": "≠", r"\in": "∈", r"\infty": "∞"}
_SYNONYMS |= {r"\emptyset": "∅", r"\varnothing": "∅"}
_SYNONYM = re.compile(
    r"\\(?:[lg](?:eq|eqslant|e|t)|neq?|in|infty|emptyset|varnothing)(?![A-Za-z])|[<>!]="
)
"""Spellings of one relation or symbol."""


def _minutes(match: re.Match[str]) -> tuple[object, ...]:
    """Return hour, minute and second; the hour is of the day unless it may be of either half."""
    hour = int(match[1])
    minute = int(match[2])
    second = int(match[3] or 0)
    if match[4]:
        return hour % 12 + 12 * (match[4].lower() == "p"), minute, second, "day"
    return hour, minute, second, "either" if 1 <= hour <= 12 else "day"


def _elements(text: str) -> tuple[str, str, list[str]] | None:
    """Return brackets and elements of a list, set, tuple or interval; no brackets around `1, x`;
    None for others."""
    text = text.replace(r"\{", "⦃").replace(r"\}", "⦄")
    opening = ""
    closing = ""
    inside = text
    if text[:1] in tuple("([⦃{") and text[-1:] in tuple(")]⦄}") and _closes_at_end(text):
        opening = text[0].replace("⦃", "{")
        closing = text[-1].replace("⦄", "}")
        inside = text[1:-1]
    elements = []
    depth = 0
    start = 0
    for place, character in enumerate(inside):
        depth += (character in "([{⦃") - (character in ")]}⦄")
        if character == "," and depth == 0:
            elements.append(inside[start:place])
            start = place + 1
    if not opening and not elements:
        return None
    elements.append(inside[start:])
    return (
        opening,
        closing,
        [element.replace("⦃", r"\{").replace("⦄", r"\}") for element in elements],
    )


def _closes_at_end(text: str) -> bool:
    """Return whether the first bracket is closed by the last character."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{⦃") - (character in ")]}⦄")
        if depth == 0:
            return place == len(text) - 1
    return False


def _folded(text: str) -> str:
    """Return words without articles and, if they are more than symbols such as `AB`, without
    case."""
    words = text.split()
    if len(words) > 1 and words[0].lower() in ("the", "a", "an"):
        words = words[1:]
    plain = " ".join(words)
    has_vowel = re.search("[aeiouy]", plain, re.IGNORECASE)
    # `ABC` is a triangle, and `abc` a product, but `Tom` is `tom`
    may_be_letters = len(plain) < 3 or not has_vowel or (len(plain) < 5 and plain.isupper())
    is_word = plain.casefold() in _SHORT_WORDS
    return plain if may_be_letters and not is_word else plain.casefold()


_SHORT_WORDS = frozenset(
    "no by yes true odd even none both all zero one two four five nine".split()
)
"""Words of a few letters that some texts write in capitals."""


def _latex(text: str) -> str:
    text = re.sub(r"\\[dt]frac", r"\\frac", text).replace("**", "^")
    text = re.sub(
        r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|ln|log|exp|pi)(?![A-Za-z])", r"\\\1", text
    ).strip()
    return re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)


def _same(one: _Reading, other: _Reading, check: Check) -> bool:
    if one.variable and other.variable and one.variable != other.variable:
        return False
    kinds = {one.kind, other.kind}
    if kinds == {"numbers"}:
        return same_numbers(one.value, other.value)
    if kinds == {"list"}:
        return _same_lists(one.value, other.value, check)
    if len(kinds) == 1 and one.value == other.value:
        return bool(one.value)
    if "formula" in kinds and kinds <= {"formula", "numbers"}:
        gold, answer = _formula_of(one), _formula_of(other)
        return bool(gold and answer) and check(gold, answer)
    return False


def _formula_of(reading: _Reading) -> str:
    """Return a formula, or a single number without unit as one, in LaTeX; nothing for others."""
    if reading.kind == "formula":
        return str(reading.value)
    numbers: tuple[Number, ...] = reading.value
    if len(numbers) > 1 or numbers[0].unit:
        return ""
    value = numbers[0].value
    return (
        str(value.numerator)
        if value.denominator == 1
        else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    )


def _same_lists(one: _List, other: _List, check: Check) -> bool:
    """Return whether two lists have equal elements, sets in any order, and the same brackets; a
    list without brackets is the same as one in parentheses."""
    opening, closing, elements = one
    brackets, others = opening + closing or "()", other[0] + other[1] or "()"
    if brackets != others or len(elements) != len(other[2]):
        return False
    if opening != "{":
        return all(_same(a, b, check) for a, b in zip(elements, other[2], strict=True))
    rest = list(other[2])
    for element in elements:
        place = next(
            (n for n, candidate in enumerate(rest) if _same(element, candidate, check)), None
        )
        if place is None:
            return False
        del rest[place]
    return True

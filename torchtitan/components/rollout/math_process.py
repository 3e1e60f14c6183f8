"""The process in which math-verify compares two formulas, as SymPy may take any time and memory.

It reads lines of JSON, `[seconds, gold, answer]`, and answers `true` or `false`. The kernel ends it
when it has used these seconds of processor time, which other programs on the machine do not
shorten: a right answer is paid under any load."""

import functools
import itertools
import json
import logging
import re
import resource
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sympy import Expr

_MAX_BYTES = 4 << 30
_POINTS = (("3/7", "-11/13", "17/5"), ("-5/3", "7/11", "-2/9"), ("13/4", "8/3", "5/8"))
"""Values of variables, in their alphabetical order. Equal formulas must have equal results for
them."""


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> object:
    """Return the formula of a LaTeX text; None unless math-verify reads all of it: it drops what it
    does not know."""
    from math_verify import LatexExtractionConfig, parse

    found = parse(f"$${text}$$", [LatexExtractionConfig()], parsing_timeout=None)
    if len(found) != 2 or _characters(found[1]) != _characters(text):
        return None
    return found[0]


def _characters(text: str) -> str:
    """Return a LaTeX text without the brackets, spaces and backslashes that a reader may add."""
    return re.sub(r"[\s{}()\\]", "", text)


def are_equal(gold: str, answer: str) -> bool:
    """Return whether math-verify finds two formulas equal, in both orders, and their values are
    equal to 30 digits."""
    if not _have_letters_of_one_case(gold, answer):
        return False
    one, other = _parsed(gold), _parsed(answer)
    return one is not None and other is not None and _equal_objects(one, other)


def _have_letters_of_one_case(*texts: str) -> bool:
    """Return whether no letter has both cases: math-verify takes `N` and `n` for one variable."""
    letters = set("".join(re.sub(r"\\[A-Za-z]+", "", text) for text in texts))
    return not any(letter.isupper() and letter.lower() in letters for letter in letters)


def _equal_objects(one: object, other: object) -> bool:
    from math_verify import verify
    from sympy import Expr, MatrixBase

    if isinstance(one, MatrixBase) and isinstance(other, MatrixBase):
        return one.shape == other.shape and all(
            itertools.starmap(_equal_objects, zip(one, other, strict=True))
        )
    if (
        not isinstance(one, Expr)
        or not isinstance(other, Expr)
        or one.free_symbols != other.free_symbols
    ):
        return False
    one, other = _exact(one), _exact(other)
    both = (verify(one, other, timeout_seconds=None), verify(other, one, timeout_seconds=None))
    return all(both) and _equal_values(one, other)


def _exact(formula: "Expr") -> "Expr":
    """Return a formula with fractions instead of its decimals, which SymPy rounds."""
    from sympy import Float, Rational

    exact: Expr = formula.xreplace(
        {number: Rational(str(number)) for number in formula.atoms(Float)}
    )
    return exact


def _equal_values(one: "Expr", other: "Expr") -> bool:
    from sympy import Rational

    names = sorted(one.free_symbols, key=str)
    n_compared = 0
    for point in _POINTS if names else _POINTS[:1]:
        values = {
            name: Rational(value)
            for name, value in zip(names, itertools.cycle(point), strict=False)
        }
        a, b = (complex_of.subs(values).evalf(40) for complex_of in (one, other))
        if not (a.is_number and b.is_number and a.is_finite and b.is_finite):
            continue
        n_compared += 1
        if not abs(a - b) <= abs(a) * Rational(1, 10**30):
            return False
    return n_compared > 0


def main() -> None:
    """Answer until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    logging.disable()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it computes
    try:
        import math_verify  # noqa: F401 (so that imports do not count in the first comparison)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
        return
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        seconds, gold, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            result = are_equal(gold, answer)
        except Exception:  # SymPy raises errors of any class
            result = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

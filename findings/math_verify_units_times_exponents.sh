#!/usr/bin/env bash
# Guess: math-verify compares the whole of two short answers, and `1e3` is a spelling of 1000.
#
# Truth: math-verify 0.9 extracts one expression from each text and compares these. Text around it
# does not count, so that `5 km` equals `5 m`, `12:30` equals 12, and an answer that ends with a
# denial of 7 equals 7. In `1e3` it finds 1 (as plain text) or 1 times Euler's number times 3 (as
# LaTeX), so that a right answer of 1000 is wrong.
#
# What a trainer must do: compare numbers with exponents, units, times and whole sentences by its
# own rules, before it asks math-verify about formulas, and give math-verify the answer alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q math-verify==0.9.0 latex2sympy2_extended==1.11.0
"$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata

from math_verify import parse, verify

print("math-verify", importlib.metadata.version("math-verify"))
EXPECTED = {
    ("5 m", "5 km"): True,
    ("12", "12:30"): True,
    ("7", "the answer is not 7"): True,
    ("1000", "1e3"): False,
    ("$1000$", "$1e3$"): False,
}
for (gold, answer), expected in EXPECTED.items():
    parsed = parse(answer)
    equal = verify(parse(gold), parsed)
    print(f"{answer!r} is read as {parsed[0]}, and equals {gold!r}: {equal}")
    assert equal == expected
print("as described")
PYTHON

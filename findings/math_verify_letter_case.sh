#!/usr/bin/env bash
# Guess: math-verify keeps the case of letters: `X` and `x`, or `R` and `r`, are different
# variables.
#
# Truth: math-verify 0.9 reads a single capital letter in LaTeX as the small one: `X^2` equals
# `x^2`, `N + n` equals `2n`, and `\pi R^2` equals `\pi r^2`, so that an answer about the wrong
# radius is right.
#
# What a trainer must do: refuse pairs of formulas in which a letter has both cases, before it asks
# math-verify.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q math-verify==0.9.0 latex2sympy2_extended==1.11.0
"$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata

from math_verify import parse, verify

print("math-verify", importlib.metadata.version("math-verify"))
for gold, answer in (("$x^2$", "$X^2$"), ("$2n$", "$N + n$"), (r"$\pi r^2$", r"$\pi R^2$")):
    equal = verify(parse(gold), parse(answer))
    print(f"{answer!r} is read as {parse(answer)[0]}, and equals {gold!r}: {equal}")
    assert equal
print("as described")
PYTHON

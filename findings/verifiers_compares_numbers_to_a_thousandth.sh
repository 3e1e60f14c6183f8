#!/usr/bin/env bash
# Guess: `compare_stdout_results` of verifiers, which rewards a program by its output, allows for the rounding of
#   floats (a relative error), and compares integers and the shape of the output as they are.
#
# Truth: verifiers 0.4 takes two outputs for equal if each pair of numbers differs by at most 0.001, whatever
#   their size: 0.0004 is -0.0004, and a program that prints 0 has each probability, rate and error below a
#   thousandth right. 5.001 is right for the integer 5, while 1000000.5 is wrong for 1000000.0, a relative error of
#   5e-7. Line ends count as spaces: a 2 x 2 table is right as one row.
#
# What a trainer must do: give `tolerance` by the size of the expected numbers, 0 for integers, and compare
#   lines itself where the shape is a part of the answer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q verifiers==0.4.0
"$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata

from verifiers.v1 import compare_stdout_results

print("verifiers", importlib.metadata.version("verifiers"))
EQUAL = [("0", "0.0009"), ("-0.0004", "0.0004"), ("5.001", "5"), ("1 2 3 4", "1 2\n3 4")]
OTHER = [("1000000.5", "1000000.0"), ("5.002", "5"), ("1 2 3", "1 2\n3 4")]
for pairs, expected in ((EQUAL, True), (OTHER, False)):
    for output, reference in pairs:
        found = compare_stdout_results(output, reference)
        print(f"{output!r} for {reference!r}:", found)
        assert found is expected
assert not compare_stdout_results("0", "0.0009", tolerance=0)
print("as described")
PYTHON

#!/usr/bin/env bash
# Guess: load_dataset returns the cells of a CSV file as they are written, at least those in quotes: "None",
#   "NA" and "007" are texts, and only an empty cell is null.
#
# Truth: datasets 5.2 reads CSV by the rules of pandas: None, null, NA, N/A, nan, n/a and others become null,
#   also in quotes. The answers "None" of a question ("None" of the above), NA (Namibia), and null (a value in
#   code) are gone; a filter of empty answers then drops just these rows. A column of digits becomes numbers: "007" is 7,
#   "1.10" is 1.1, and with one null in the column "12" is 12.0. A stream does the same.
#
# What a trainer must do: read CSV with Python's csv; or give `features` with Value("string"), which keep
#   007, and `keep_default_na=False`, which keeps None. Either alone is not enough.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pandas==3.1.1
HF_HOME="$folder/home" "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import csv
import sys

import datasets
import pandas

print("datasets", datasets.__version__, "pandas", pandas.__version__)
datasets.disable_progress_bars()
path = f"{sys.argv[1]}/rows.csv"
TEXT = datasets.Features({name: datasets.Value("string") for name in ("question", "answer")})


def answers(texts, **options):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerows([["question", "answer"], *(["Which?", text] for text in texts)])
    with open(path, newline="") as file:
        assert [row["answer"] for row in csv.DictReader(file)] == texts
    rows = datasets.load_dataset("csv", data_files=path, split="train", **options)
    return [row["answer"] for row in rows]


words = ["None", "null", "NA", "N/A", "nan", "n/a", "both"]
print(words, "->", answers(words))
assert answers(words) == [None] * 6 + ["both"] == answers(words, streaming=True)
assert answers(words, features=TEXT) == [None] * 6 + ["both"]
assert answers(words, keep_default_na=False) == words

print(["007", "12"], "->", answers(["007", "12"]))
assert answers(["007", "12"]) == [7, 12]
print(["1.10", "12", "NA"], "->", answers(["1.10", "12", "NA"]))
assert answers(["1.10", "12", "NA"]) == [1.1, 12.0, None]
assert answers(["007", "1.10"], keep_default_na=False) == [7.0, 1.1]
both = ["007", "1.10", "None", "NA"]
assert answers(both, features=TEXT, keep_default_na=False) == both
print("as described")
PYTHON

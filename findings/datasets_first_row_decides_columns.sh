#!/usr/bin/env bash
# Guess: `Dataset.from_list(rows)` and `Dataset.from_generator(...)` have the keys of all rows as
#   columns, with None where a row lacks one, as `concatenate_datasets` and pandas have; and what a
#   function of `map` adds to some rows is in the result.
#
# Truth: datasets 5.2 takes the keys of the first row, as pyarrow's `Table.from_pylist` does. What
#   only later rows have is dropped, without a message: system prompts, tools, rejected answers, images.
#   `map` also drops the columns that a function adds to later rows only. A stream (`IterableDataset`)
#   keeps all of it, so the same rows train differently.
#
# What a trainer must do: read rows with its own reader, or give `features` with the keys of all rows;
# and compare what arrives with a row that has a key that the first one lacks.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pyarrow==26.0.1
export HF_HOME="$folder/home" HF_DATASETS_DISABLE_PROGRESS_BARS=1
"$folder/venv/bin/python" - <<'PYTHON'
import warnings

import datasets
import pandas
import pyarrow

warnings.simplefilter("error")
print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
ROWS = [
    {"prompt": "2 + 2?", "answer": "4"},
    {"prompt": "3 + 3?", "answer": "6", "system": "Answer in a word."},
]


def rows():
    yield from ROWS


streamed = list(datasets.IterableDataset.from_generator(rows))
print(f"IterableDataset.from_generator: {streamed}")
assert streamed == ROWS
found = {
    "pyarrow.Table.from_pylist": pyarrow.Table.from_pylist(ROWS).to_pylist(),
    "Dataset.from_list": list(datasets.Dataset.from_list(ROWS)),
    "Dataset.from_generator": list(datasets.Dataset.from_generator(rows)),
    "Dataset.from_list, reversed": list(datasets.Dataset.from_list(ROWS[::-1])),
}
for name, kept in found.items():
    print(f"{name}: {kept}")
lacking = [name for name, kept in found.items() if all("system" not in row for row in kept)]
assert lacking == ["pyarrow.Table.from_pylist", "Dataset.from_list", "Dataset.from_generator"]

numbers = datasets.Dataset.from_list([{"n": n} for n in range(4)])
odd = lambda row: {"odd": True} if row["n"] % 2 else {}  # noqa: E731
mapped, streamed = list(numbers.map(odd)), list(numbers.to_iterable_dataset().map(odd))
print(f"Dataset.map: {mapped}")
print(f"IterableDataset.map: {streamed}")
assert mapped == [{"n": n} for n in range(4)]
assert streamed[1] == {"n": 1, "odd": True}

whole = datasets.concatenate_datasets([datasets.Dataset.from_list([row]) for row in ROWS])
assert [row["system"] for row in whole] == [None, ROWS[1]["system"]]
assert "system" in pandas.DataFrame(ROWS)
print("as described")
PYTHON

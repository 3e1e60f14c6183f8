#!/usr/bin/env bash
# Guess: `IterableDataset.from_generator(rows)` yields what the function yields: it is a stream, reads no
#   cache, and does not depend on what other programs did before.
#
# Truth: datasets 5.2 gives the stream the columns that its cache of files has for the same function. If
#   `Dataset.from_generator(rows)` was called before, in this process or an earlier one, the stream drops
#   the keys that the first row lacks, without a message: on this machine, not on the next.
#
# What a trainer must do: call the function itself, or give `features`; do not compare a stream with a
# Dataset of the same function to find out whether rows arrive whole.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pyarrow==26.0.1
export HF_HOME="$folder/home" HF_DATASETS_DISABLE_PROGRESS_BARS=1
cat > "$folder/rows.py" <<'PYTHON'
import sys
import warnings

import datasets

warnings.simplefilter("error")
ROWS = [
    {"prompt": "2 + 2?", "answer": "4"},
    {"prompt": "3 + 3?", "answer": "6", "system": "Answer in a word."},
]
WITHOUT = [ROWS[0], {"prompt": "3 + 3?", "answer": "6"}]


def rows():
    yield from ROWS


stream = list(datasets.IterableDataset.from_generator(rows))
print(f"{sys.argv[1]}: {stream}")
if sys.argv[1] == "before":
    print("datasets", datasets.__version__)
    assert stream == ROWS
    datasets.Dataset.from_generator(rows)
    assert list(datasets.IterableDataset.from_generator(rows)) == WITHOUT
else:
    assert stream == WITHOUT
    features = datasets.Features(dict.fromkeys(ROWS[1], datasets.Value("string")))
    named = list(datasets.IterableDataset.from_generator(rows, features=features))
    print(f"with features: {named}")
    assert named == [ROWS[0] | {"system": None}, ROWS[1]]
PYTHON
"$folder/venv/bin/python" "$folder/rows.py" before
"$folder/venv/bin/python" "$folder/rows.py" after
echo "as described"

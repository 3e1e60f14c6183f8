#!/usr/bin/env bash
# Guess: `map` and `filter` compute again when the code of their function has changed: the documentation says
#   that a fingerprint of the function decides whether a cached result is used.
#
# Truth: datasets 5.2 hashes the source of functions of the script that runs only. A function of another file,
#   such as `cleaning.clean`, counts by its name. After an edit of that file, and after an update of an
#   installed package, `map(cleaning.clean)`, `map(lambda row: cleaning.clean(row))` and
#   `filter(cleaning.keep)` return what the old code made, in a new process, without a message: fixed
#   cleaning, templates or masks are not trained.
#
# What a trainer must do: pass `load_from_cache_file=False` or a `new_fingerprint` with the digest of the
#   code, or call functions itself; after an edit, look at a row that it must have changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 dill==0.4.1
cat > "$folder/run.py" <<'PYTHON'
import sys

import cleaning
import datasets

datasets.disable_progress_bars()
rows = datasets.load_dataset("json", data_files=sys.argv[1], split="train")


def prefixed(row):
    return {"text": PREFIX + row["text"]}


PREFIX = sys.argv[2]
print(rows.map(cleaning.clean)[0]["text"], end=" ")
print(rows.map(lambda row: cleaning.clean(row))[0]["text"], end=" ")
print(len(rows.filter(cleaning.keep)), end=" ")
print(rows.map(prefixed)[0]["text"], end=" ")
print(rows.map(cleaning.clean, load_from_cache_file=False)[0]["text"])
PYTHON
cd "$folder"
python="$folder/venv/bin/python"
export HF_HOME="$folder/home" PYTHONDONTWRITEBYTECODE=1
"$python" -c 'import datasets; print("datasets", datasets.__version__)'
printf '{"text": "Some"}\n{"text": "A"}\n' > rows.jsonl
cat > cleaning.py <<'PYTHON'
def clean(row):
    return {"text": row["text"].lower()}


def keep(row):
    return len(row["text"]) > 1
PYTHON
before=$("$python" run.py rows.jsonl a-)
cat > cleaning.py <<'PYTHON'
def clean(row):
    return {"text": row["text"].upper()}


def keep(row):
    return True
PYTHON
after=$("$python" run.py rows.jsonl b-)
echo "map, map of a lambda, rows of filter, function of the script, without the cache"
echo "before: $before"
echo "after:  $after"
test "$before" = "some some 1 a-Some some"
test "$after" = "some some 1 b-Some SOME"
echo "as described"

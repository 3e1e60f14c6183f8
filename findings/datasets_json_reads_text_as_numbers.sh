#!/usr/bin/env bash
# Guess: load_dataset returns the values of a JSON Lines file, text as text.
#
# Truth: datasets 5.2 gives a column whose values have several types, such as messages with text and
#   messages with lists of parts, the type Json, which stores JSON text. It takes text that is itself
#   valid JSON for that, so the text "42" is returned as the number 42, "5." as 5.0, "true" as True
#   and "null" as None. Other text in the same column stays text, also with a stream.
#
# What a trainer must do: read JSON Lines itself, as the text cannot be recovered; refuse a message
#   whose content is a number instead of writing it as text, since "5." is not "5.0".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0
cat >"$folder/try.py" <<'PYTHON'
import json

import datasets

contents = ["Hello", "42", "5.", "true", "null", [{"type": "text", "text": "Hi"}]]
with open("data.jsonl", "w") as file:
    for content in contents:
        file.write(json.dumps({"message": {"role": "user", "content": content}}) + "\n")
print("datasets", datasets.__version__)
for streaming in (False, True):
    rows = datasets.load_dataset(
        "json", data_files="data.jsonl", split="train", cache_dir="cache", streaming=streaming
    )
    found = [row["message"]["content"] for row in rows]
    print(f"streaming={streaming}, {rows.features}: {contents} is returned as {found}")
    assert found == ["Hello", 42, 5.0, True, None, contents[-1]], found
print("as described")
PYTHON
cd "$folder" && venv/bin/python try.py

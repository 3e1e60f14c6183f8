#!/usr/bin/env bash
# Guess: load_dataset returns the text of a JSON Lines file as text: JSON has no type for dates, so "2024-01-05"
#   stays "2024-01-05".
#
# Truth: datasets 5.2 reads JSON with pyarrow, which takes a column (or a key of messages) for timestamps if
#   every text in the first block of the file is a date or a time of ISO 8601. The rows hold datetime objects,
#   and `str` or a template makes "2024-01-05 00:00:00" of them: another answer than the file's, which
#   the model learns and a reward compares. "2024-01-05T10:00:00Z" and "2024-01-05T12:00:00+02:00" become
#   the same text. One other text in the block, such as "unknown", and all stay text.
#   A stream does the same. `features` with Value("string") do not help:
#   the text is read as a time first, and "2024-01-05 00:00:00" is what the string holds.
#
# What a trainer must do: read JSON Lines itself, and refuse a time where it expects text, since the text cannot
#   be recovered. With `features`, nothing shows that it was another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pyarrow==26.0.1
HF_HOME="$folder/home" "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import datetime
import json
import sys

import datasets
import pyarrow

print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
datasets.disable_progress_bars()
path = f"{sys.argv[1]}/rows.jsonl"


def read(rows, **options):
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return list(datasets.load_dataset("json", data_files=path, split="train", **options))


def answers(texts, **options):
    found = read([{"question": "When?", "answer": text} for text in texts], **options)
    return [row["answer"] for row in found]


days = ["2024-01-05", "2023-11-30"]
print(days, "->", [str(answer) for answer in answers(days)])
assert answers(days) == [datetime.datetime(2024, 1, 5), datetime.datetime(2023, 11, 30)]
assert [str(answer) for answer in answers(days)] == [f"{day} 00:00:00" for day in days]
assert answers(days, streaming=True) == answers(days)
features = datasets.Features({name: datasets.Value("string") for name in ("question", "answer")})
print("as strings:", answers(days, features=features))
assert answers(days, features=features) == [f"{day} 00:00:00" for day in days]

times = ["2024-01-05T10:00:00Z", "2024-01-05T12:00:00+02:00"]
print(times, "->", [str(answer) for answer in answers(times)])
assert len(set(map(str, answers(times)))) == 1

assert answers([*days, "unknown"]) == [*days, "unknown"]
chat = [{"role": "user", "content": "2024-01-05"}, {"role": "assistant", "content": "2024-01-06"}]
contents = [message["content"] for message in read([{"messages": chat}])[0]["messages"]]
print("messages:", contents)
assert contents == [datetime.datetime(2024, 1, 5), datetime.datetime(2024, 1, 6)]
print("as described")
PYTHON

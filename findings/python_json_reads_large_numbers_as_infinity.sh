#!/usr/bin/env bash
# Guess: `json.loads(text, parse_constant=refuse)` returns only what JSON can carry, since JSON has no
#   infinity, and json.dumps writes such values back as they came.
#
# Truth: Python 3.11's `parse_constant` sees only the words NaN, Infinity and -Infinity. The valid
#   number 1e999 becomes the float inf without a call of it, and json.dumps writes inf as Infinity,
#   which is not JSON. The valid text "\ud800" becomes half a character, which json.dumps with
#   ensure_ascii=False returns, and which cannot be encoded.
#
# What a trainer must do: write what a model or a row gave with allow_nan=False and encode it before
#   it is passed on, or refuse such numbers by parse_float.
set -euo pipefail
python3 - <<'PYTHON'
import json
import sys


def refuse(name):
    raise ValueError(name)


value = json.loads(r'{"number": 1e999, "text": "\ud800"}', parse_constant=refuse)
written = json.dumps(value, ensure_ascii=False)
print("Python", sys.version.split()[0], ascii(value), "->", ascii(written))
assert value["number"] == float("inf") and '"number": Infinity' in written
try:
    written.encode()
except UnicodeEncodeError as error:
    print("cannot be encoded:", error.reason)
else:
    raise SystemExit("half a character was encoded")
for word in ("NaN", "Infinity", "-Infinity"):
    try:
        json.loads(word, parse_constant=refuse)
    except ValueError as error:
        assert str(error) == word
print("as described")
PYTHON

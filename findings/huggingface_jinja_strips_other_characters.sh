#!/usr/bin/env bash
# Guess: @huggingface/jinja, with which transformers.js and other programs in JavaScript render chat templates,
#   gives the text of Python's Jinja2, or an error for what it does not know.
#
# Truth: @huggingface/jinja 0.5.11 takes `strip(chars)`, `lstrip(chars)` and `rstrip(chars)` for `trim()` of
#   white space: `content.lstrip('\n')`, which Qwen3's template has, removes the indent of code as well, and
#   `rstrip('-')` removes nothing. Null is written as nothing instead of None, and true instead of True; a number 1.0 of
#   a tool's schema or a call is 1, and digits after the 17th are others; `length` counts 🙂 twice, `-7 % 3` is
#   -1, equal lists are unequal, and '3' equals 3. All of it without an error, so that a model gets another prompt
#   in a browser than in training.
#
# What a trainer must do: write templates with `trim` filters or loops instead of `strip(chars)`, with
#   `tojson` for values, and with null checked; and compare the text of both for messages with leading spaces,
#   calls and schemas.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jinja2==3.1.6
cd "$folder"
npm install --silent --no-fund --no-audit @huggingface/jinja@0.5.11 > /dev/null
cat > try.py <<'PYTHON'
import json

import jinja2
import jinja2.sandbox

CASES = {  # in Python, in JavaScript
    "{{ '\n    return 1'.lstrip('\\n') }}": ("    return 1", "return 1"),
    "{{ 'a--'.rstrip('-') }}": ("a", "a--"),
    "{{ nothing }} {{ yes }}": ("None True", " true"),
    "{{ number }} {{ id }}": ("1.0 12345678901234567890", "1 12345678901234567000"),
    "{{ 'é🙂' | length }}": ("2", "3"),
    "{{ -7 % 3 }}": ("2", "-1"),
    "{{ 'same' if [1] == [1] else 'other' }}": ("same", "other"),
    "{{ 'same' if '3' == 3 else 'other' }}": ("other", "same"),
    "{{ ' a '.strip() }} {{ 'a' in 'ab' and 'b' or '' }} {{ 7 // 2 }}": ("a b 3", "a b 3"),
}
TEXT = '{"nothing": null, "yes": true, "number": 1.0, "id": 12345678901234567890}'
environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
print("jinja2", jinja2.__version__)
for template, (expected, _) in CASES.items():
    assert environment.from_string(template).render(json.loads(TEXT)) == expected, template
with open("cases.json", "w") as file:
    json.dump([TEXT, *CASES.items()], file)
PYTHON
venv/bin/python try.py
cat > try.mjs <<'JAVASCRIPT'
import { readFileSync } from "node:fs";
import { Template } from "@huggingface/jinja";

const { version } = JSON.parse(readFileSync("node_modules/@huggingface/jinja/package.json"));
console.log("@huggingface/jinja", version);
const [text, ...cases] = JSON.parse(readFileSync("cases.json"));
for (const [template, [python, expected]] of cases) {
    const found = new Template(template).render(JSON.parse(text));
    console.log(JSON.stringify({ template, python, found }));
    if (found !== expected) throw new Error("changed");
}
console.log("as described");
JAVASCRIPT
node try.mjs

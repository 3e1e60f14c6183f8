#!/usr/bin/env bash
# Guess: a chat template rendered by Jinja2 in its sandbox, with `trim_blocks` and `lstrip_blocks`, gives the text
#   that `apply_chat_template` gives. `tojson` is `json.dumps`.
#
# Truth: Jinja2's own `tojson` is made for HTML. It sorts the keys, so that a tool begins with "function"
#   instead of "type" and an argument's description comes before its name and type, and it writes <, >, &, '
#   and all letters that are not ASCII as \u003c and the like. transformers 5.23 replaces the filter by
#   json.dumps(ensure_ascii=False), without sorting. So a program that renders a model's template with Jinja2 alone writes
#   tools, arguments and results in other tokens than the model was trained on, without an error;
#   templates without tools show no difference. (`tojson(indent=None, ensure_ascii=False)`, as
#   some templates call it, is a TypeError in Jinja2 alone.)
#
# What a trainer must do: set `environment.filters["tojson"]` as transformers does before it renders, and
#   compare the prompt of a conversation with tools, <, ' and é with that of transformers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jinja2==3.1.6 transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import json

import jinja2
import jinja2.sandbox
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

print("jinja2", jinja2.__version__, "transformers", transformers.__version__)
TEMPLATE = """{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{%- for message in messages %}
{{ message.role }}: {{ message.content }}{{ message.tool_calls | default([]) | tojson }}
{%- endfor %}"""
TOOLS = [{"type": "function", "function": {"name": "Chloé", "description": "is a < b?"}}]
CALL = {"type": "function", "function": {"name": "Chloé", "arguments": {"b": "it's", "a": 1}}}
MESSAGES = [
    {"role": "user", "content": "1 < 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
]
environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
alone = environment.from_string(TEMPLATE).render(messages=MESSAGES, tools=TOOLS)
[[text], _] = render_jinja_template([MESSAGES], tools=TOOLS, chat_template=TEMPLATE)
print(f"jinja2:\n{alone}\ntransformers:\n{text}")
for part in (TOOLS[0], [CALL]):
    assert json.dumps(part, ensure_ascii=False) in text
assert r'{"function": {"description": "is a \u003c b?", "name": "Chlo\u00e9"}, "type": ' in alone
assert r'"arguments": {"a": 1, "b": "it\u0027s"}' in alone
plain = [{"role": "user", "content": "1 < 2? it's é"}]
words = "{% for message in messages %}{{ message.content }}{% endfor %}"
assert (
    environment.from_string(words).render(messages=plain)
    == render_jinja_template([plain], chat_template=words)[0][0]
)
try:
    environment.from_string("{{ 1 | tojson(ensure_ascii=False) }}").render()
except TypeError as error:
    print("TypeError:", error)
else:
    raise AssertionError("no error")


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


environment.filters["tojson"] = tojson
assert environment.from_string(TEMPLATE).render(messages=MESSAGES, tools=TOOLS) == text
print("as described")
PYTHON

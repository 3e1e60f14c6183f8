#!/usr/bin/env bash
# Guess: apply_chat_template gives a template the messages that it got, so that `message.content is
#   none` is true for `"content": null`.
#
# Truth: transformers 5.23 removes keys with null before it renders: the content is then undefined,
#   which is not none, and templates that ask `content is none` (DeepSeek R1's distilled ones, LFM2)
#   write no call, or fail. Jinja itself, and other servers, give null.
#
# What a trainer must do: try null, a missing key and an empty text with each template, and take one
# that writes the call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 jinja2==3.1.6
"$folder/venv/bin/python" - <<'PYTHON'
import jinja2
import tokenizers
import transformers

print("transformers", transformers.__version__, "jinja2", jinja2.__version__)
source = "{% for m in messages %}{{ 'none' if m.content is none else 'else' }} {{ 'content' in m }};{% endfor %}"
messages = [{"role": "assistant", "content": None, "tool_calls": []}]
plain = jinja2.Template(source).render(messages=messages)
backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
rendered = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False)
print(f"jinja2: {plain}\ntransformers: {rendered}")
assert (plain, rendered) == ("none True;", "else False;")
print("as described")
PYTHON

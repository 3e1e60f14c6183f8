#!/usr/bin/env bash
# Guess: the text of a tool's result reaches the model as it is.
#
# Truth: mistral-common 1.13 parses results that look like JSON and writes the values anew, for v2,
#   v3 and tekken v3: 1e3 becomes 1000.0, 1.10 becomes 1.1, "a" loses its quotes, of two equal keys
#   one is left, and large numbers lose digits. 007 is no JSON and stays text. (The Jinja template
#   of the same models writes the text without any quotes.)
#
# What a trainer must do: take the form that the server of the model uses, and not expect that one
# of the two gives the ids of the other; to keep a result as it is, wrap it in an object yourself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q mistral-common==1.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import pathlib

import mistral_common
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

print("mistral-common", mistral_common.__version__)
EXPECTED = {
    "1e3": "1000.0", "1.10": "1.1", '"a"': '"a"', '{"a": 1, "a": 2}': '{"a": 2}', "007": '"007"',
    "r1": '"r1"', "12345678901234567890.5": "1.2345678901234567e+19",
}
data = pathlib.Path(mistral_common.__file__).parent / "data"
tokenizer = MistralTokenizer.from_file(str(data / "tekken_240718.json"))
call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": "{}"}}
for result, expected in EXPECTED.items():
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": result},
    ]
    text = tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages)).text
    written = text.partition('{"content": ')[2].partition(', "call_id"')[0]
    print(f"{result} is written as {written}")
    assert written == expected
print("as described")
PYTHON

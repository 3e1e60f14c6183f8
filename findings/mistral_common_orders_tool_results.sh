#!/usr/bin/env bash
# Guess: mistral-common writes the results of parallel calls in the order of the request, as chat
#   templates and its own earlier versions do.
#
# Truth: mistral-common 1.13 keeps the order for versions 3 and 7 of the tokenizer, and puts the
#   results in the order of the calls from version 11 on. From version 13 on, the format has no ids
#   of calls either. A Jinja template writes the results as they come, so that a model reads the
#   first result as that of the first call.
#
# What a trainer must do: know whether the format writes ids. If it does not, results in another
# order than their calls are wrong in the prompt of the next turn, unless they are put in order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q mistral-common==1.13.0
cat > "$folder/try.py" <<'PYTHON'
import importlib.metadata
import json
import pathlib
import sys

import mistral_common
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

print("mistral-common", importlib.metadata.version("mistral-common"))
data = pathlib.Path(mistral_common.__file__).parent / "data"
# The package has no files of these versions; their formats need these special tokens.
tekken = json.loads((data / "tekken_240718.json").read_text())
names = "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS]"
names += " [/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE]"
names += " [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] [CALL_ID]"
tekken["special_tokens"] = [
    {"rank": rank, "token_str": name, "is_control": True}
    for rank, name in enumerate(names.split())
]
file = pathlib.Path(sys.argv[1]) / "tekken.json"


def call(id, city):
    function = {"name": "weather", "arguments": json.dumps({"city": city})}
    return {"id": id, "type": "function", "function": function}


messages = [
    {"role": "user", "content": "Weather in Paris and Rome?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("abcdefgh1", "Paris"), call("abcdefgh2", "Rome")],
    },
    {"role": "tool", "name": "weather", "tool_call_id": "abcdefgh2", "content": "Rome: rain"},
    {"role": "tool", "name": "weather", "tool_call_id": "abcdefgh1", "content": "Paris: sun"},
]
parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
request = ChatCompletionRequest(messages=messages, tools=tools)
is_ordered = {}
for version in ("v7", "v11", "v13"):
    tekken["config"]["version"] = version
    file.write_text(json.dumps(tekken))
    text = MistralTokenizer.from_file(str(file)).encode_chat_completion(request).text
    results = text[text.index("[TOOL_RESULTS]") :]
    print(f"{version}: {results}")
    is_ordered[version] = results.index("sun") < results.index("rain")
    assert ("abcdefgh1" in results) == (version != "v13")
assert is_ordered == {"v7": False, "v11": True, "v13": True}
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder"

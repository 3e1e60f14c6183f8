#!/usr/bin/env bash
# Guess: the system prompt of a conversation is at its beginning, in each version of Mistral's
# tokenizers.
#
# Truth: mistral-common 1.13 writes it into the first user turn with v1, and into the last user turn
#   with v2, v3 and tekken; only v7 and later have a place for it. The tokens of an earlier turn
#   thus differ if another turn follows: a conversation of two turns is not one sequence in which
#   both answers follow what inference gives.
#
# What a trainer must do: render the conversation up to each answer, and train the answers of such
# templates as samples of their own (or only the last one).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q mistral-common==1.13.0 sentencepiece==0.2.3
"$folder/venv/bin/python" - <<'PYTHON'
import pathlib

import mistral_common
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

print("mistral-common", mistral_common.__version__)
FILES = {
    "tokenizer.model.v1": "first", "mistral_instruct_tokenizer_240216.model.v2": "last",
    "mistral_instruct_tokenizer_240323.model.v3": "last", "tekken_240718.json": "last",
    "mistral_instruct_tokenizer_241114.model.v7": "apart",
}
texts = ["Be kind.", "Hi", "Ho!", "More"]
roles = ["system", "user", "assistant", "user"]
messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
data = pathlib.Path(mistral_common.__file__).parent / "data"
for file, expected in FILES.items():
    tokenizer = MistralTokenizer.from_file(str(data / file))
    whole = tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages))
    first = tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages[:2]))
    print(f"{file}: {whole.text!r}")
    is_first = whole.text.index("kind") < whole.text.index("Hi")
    place = "apart" if "[SYSTEM_PROMPT]" in whole.text else "first" if is_first else "last"
    assert place == expected
    assert (whole.tokens[: len(first.tokens)] == first.tokens) == (expected != "last")
print("as described")
PYTHON

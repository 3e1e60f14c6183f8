#!/usr/bin/env bash
# Guess: openai-harmony's render_conversation_for_training renders what gpt-oss must write: its
#   analysis, then the final message.
#
# Truth: with its defaults, openai-harmony 0.0.8 drops the analysis before the first final message.
#   A conversation of one turn loses all of its reasoning; of two turns, the second keeps it. No
#   warning is given.
#
# What a trainer must do: render with RenderConversationConfig(auto_drop_analysis=False) up to each
# turn, after a prompt in which earlier analysis is dropped as at inference; or use the model's chat
# template in the same way.
#
# openai-harmony downloads the vocabulary o200k_base. Here it comes from the package js-tiktoken of
# npm, which has the same ranks; openai-harmony checks the digest of the file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q openai-harmony==0.0.8
(cd "$folder" && npm pack --silent js-tiktoken@1.0.21 >/dev/null && tar xzf js-tiktoken-1.0.21.tgz)
cat > "$folder/try.py" <<'PYTHON'
import importlib.metadata
import json
import os
import pathlib
import re
import sys

from openai_harmony import (
    Conversation, HarmonyEncodingName, Message, RenderConversationConfig, Role,
    load_harmony_encoding,
)

print("openai-harmony", importlib.metadata.version("openai-harmony"))
folder = pathlib.Path(sys.argv[1])
text = (folder / "package/dist/ranks/o200k_base.js").read_text()
ranks = json.loads(re.search(r'"bpe_ranks":\s*("(?:[^"\\]|\\.)*")', text)[1])
lines = []
for line in filter(None, ranks.split("\n")):
    _, first, *tokens = line.split(" ")
    lines += [f"{token} {int(first) + i}\n" for i, token in enumerate(tokens)]
(folder / "o200k_base.tiktoken").write_text("".join(lines))
os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def turn(number):
    thought = Message.from_role_and_content(Role.ASSISTANT, f"Thought {number}.")
    answer = Message.from_role_and_content(Role.ASSISTANT, f"Answer {number}.")
    return [
        Message.from_role_and_content(Role.USER, f"Question {number}?"),
        thought.with_channel("analysis"),
        answer.with_channel("final"),
    ]


for messages, expected in ((turn(1), [False]), ([*turn(1), *turn(2)], [False, True])):
    conversation = Conversation.from_messages(messages)
    for config in (None, RenderConversationConfig(auto_drop_analysis=False)):
        ids = encoding.render_conversation_for_training(conversation, *filter(None, [config]))
        text = encoding.decode(ids)
        kept = [f"Thought {number + 1}." in text for number in range(len(expected))]
        print(f"{'defaults' if config is None else 'auto_drop_analysis=False'}: {text}")
        assert kept == (expected if config is None else [True] * len(expected))
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder"

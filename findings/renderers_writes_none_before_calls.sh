#!/usr/bin/env bash
# Guess: a message with tool calls and `"content": null`, which is how OpenAI's API returns it, is
#   rendered as one with calls alone.
#
# Truth: renderers 0.1.12 writes the text None before the calls with its renderers for GLM-4.5 and
#   MiniMax M2, and its training mask trains the model to write it.
#
# What a trainer must do: replace a null content by an empty text before it renders, and check what
# is trained.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q renderers==0.1.12 transformers==5.23.0 httpx==0.28.1
cat > "$folder/try.py" <<'PYTHON'
import importlib.metadata

import renderers
import tokenizers
import transformers

print("renderers", importlib.metadata.version("renderers"))
SPECIAL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"]
SPECIAL += ["<|observation|>", "]~!b[", "]~b]", "[e~["]
TAGS = ["think", "tool_call", "tool_response", "arg_key", "arg_value", "minimax:tool_call"]
alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
vocabulary = {byte: i for i, byte in enumerate(alphabet)}
backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = tokenizers.decoders.ByteLevel()
backend.add_special_tokens(SPECIAL)
backend.add_tokens(["/nothink", *(f"<{end}{tag}>" for tag in TAGS for end in ("", "/"))])
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
call = {"id": "call1", "type": "function", "function": {"name": "add", "arguments": {"a": 15}}}
for config in (renderers.GLM45RendererConfig(), renderers.MiniMaxM2RendererConfig()):
    renderer, trained = renderers.create_renderer(tokenizer, config), {}
    for content in ("", None):
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
        ]
        sample = renderers.build_training_sample(renderer, messages)
        flagged = zip(sample.token_ids, sample.loss_mask)
        trained[content] = tokenizer.decode([i for i, flag in flagged if flag])
    print(f"{config.name}: {trained[None]!r}")
    assert "None" in trained[None] and "None" not in trained[""]
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py"

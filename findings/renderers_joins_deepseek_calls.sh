#!/usr/bin/env bash
# Guess: a hand-written renderer of a model writes the same text as the model's published template.
#
# Truth: DeepSeek's template begins each call after the first one with a line end. renderers 0.1.12
#   writes the calls of DeepSeek V3 and R1 without it, and its training mask trains this text.
#
# What a trainer must do: compare what it trains with the template's own text, also with several
# calls; a single call shows no difference.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q renderers==0.1.12 transformers==5.23.0 httpx==0.28.1
"$folder/venv/bin/pip" download -q --no-deps --dest "$folder" trl==1.16.0
"$folder/venv/bin/python" -m zipfile -e "$folder"/trl-*.whl "$folder/trl"
cat > "$folder/try.py" <<'PYTHON'
import importlib.metadata
import pathlib
import sys

import renderers
import tokenizers
import transformers

print("renderers", importlib.metadata.version("renderers"))
# the published template of DeepSeek R1, which V3's equals but for the reasoning
template = pathlib.Path(sys.argv[1], "trl/chat_templates/deepseekv3.jinja").read_text()
NAMES = ["begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep"]
NAMES += [f"tool▁{part}▁{end}" for part in ("calls", "call", "outputs", "output")
          for end in ("begin", "end")]
alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
vocabulary = {byte: i for i, byte in enumerate(alphabet)}
backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = tokenizers.decoders.ByteLevel()
backend.add_special_tokens([f"<｜{name}｜>" for name in NAMES])
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, bos_token="<｜begin▁of▁sentence｜>", chat_template=template
)


def call(number):
    function = {"name": "add", "arguments": '{"a": %d}' % number}
    return {"id": f"call{number}", "type": "function", "function": function}


for config in (renderers.DeepSeekV3RendererConfig(), renderers.DeepSeekR1RendererConfig()):
    renderer = renderers.create_renderer(tokenizer, config)
    for calls in ([call(1)], [call(1), call(2)]):
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        sample = renderers.build_training_sample(renderer, messages)
        theirs = tokenizer.decode(sample.token_ids)
        published = tokenizer.apply_chat_template(messages, tokenize=False)
        print(f"{config.name}, {len(calls)} calls: equal {theirs == published}")
        assert (theirs == published) == (len(calls) == 1)
        assert theirs == published.replace("\n<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>")
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder/trl"

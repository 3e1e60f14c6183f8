#!/usr/bin/env bash
# Guess: the training sample of an answer begins with the prompt that the same renderer gives to
#   inference, so that the model learns to continue this prompt.
#
# Truth: with renderers 0.1.12 for MiniMax M2 and DeepSeek R1, the prompt of inference ends with
#   "<think>" and a line end. An answer without reasoning is trained directly after the header of
#   the assistant: the model never learns to close the reasoning that every prompt opens. R1's
#   renderer also leaves out reasoning that the message has.
#
# What a trainer must do: check that each training sample begins with the prompt of inference, and
#   train the tag that closes the reasoning also if there is none.
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
special = ["]~!b[", "]~b]", "[e~[", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"]
special += ["<｜Assistant｜>", "<｜tool▁sep｜>"]
for name in ("calls", "call", "outputs", "output"):
    special += [f"<｜tool▁{name}▁{place}｜>" for place in ("begin", "end")]
tags = ["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"]
alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
vocabulary = {byte: i for i, byte in enumerate(alphabet)}
backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = tokenizers.decoders.ByteLevel()
backend.add_special_tokens(special)
backend.add_tokens(tags)
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)

question = {"role": "user", "content": "Hi"}
answers = {
    "without reasoning": {"role": "assistant", "content": "Ho!"},
    "with reasoning": {"role": "assistant", "content": "Ho!", "reasoning_content": "Hm."},
}
configs = (renderers.MiniMaxM2RendererConfig(), renderers.DeepSeekR1RendererConfig())
for config in configs:
    renderer = renderers.create_renderer(tokenizer, config)
    prompt = renderer.render_ids([question], add_generation_prompt=True)
    print(f"{config.name}: prompt {tokenizer.decode(prompt)[-30:]!r}")
    assert tokenizer.decode(prompt).endswith("<think>\n")
    for kind, answer in answers.items():
        sample = renderers.build_training_sample(renderer, [question, answer])
        ids = list(sample.token_ids)
        trained = [i for i, flag in zip(ids, sample.loss_mask) if flag]
        continues = ids[: len(prompt)] == prompt
        print(f"  {kind}: trained {tokenizer.decode(trained)!r}, continues the prompt: {continues}")
        is_kept = kind == "with reasoning" and config is configs[0]
        assert continues == is_kept and ("Hm." in tokenizer.decode(trained)) == is_kept
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py"

#!/usr/bin/env bash
# Guess: a training mask that marks what the model writes at inference begins where the same
#   library's generation prompt ends, and ends with what the model's template writes.
#
# Truth: renderers 0.1.12 masks by its own idea of a turn. For Qwen3.5 its prompt ends with an empty
#   block of reasoning, and the mask trains that block; for GLM-4.5 and 4.6 its prompt ends before a
#   line end, which the mask leaves out, so that the first token at inference is never trained. A
#   last turn of GLM ends with <|endoftext|> (only if ensure_final_stop is given), although all
#   earlier ones end with <|user|>.
#
# What a trainer must do: take prompt and completion from two renderings, as inference does, and not
# from marks.
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
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
]
TAGS = ["think", "tool_call", "tool_response", "arg_key", "arg_value"]
alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
vocabulary = {byte: i for i, byte in enumerate(alphabet)}
backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = tokenizers.decoders.ByteLevel()
backend.add_special_tokens(SPECIAL)
backend.add_tokens(["/nothink", *(f"<{end}{tag}>" for tag in TAGS for end in ("", "/"))])
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho!"}


def show(config):
    """Return the end of the generation prompt, and what is trained after it."""
    renderer = renderers.create_renderer(tokenizer, config)
    prompt = tokenizer.decode(renderer.render_ids([question], add_generation_prompt=True))
    sample = renderers.build_training_sample(renderer, [question, answer], ensure_final_stop=True)
    trained = tokenizer.decode([i for i, flag in zip(sample.token_ids, sample.loss_mask) if flag])
    print(f"{config.name}: {tokenizer.decode(sample.token_ids)!r}")
    print(f"  prompt {prompt!r}\n  trained {trained!r}")
    return prompt, trained


prompt, trained = show(renderers.Qwen35RendererConfig(enable_thinking=False))
assert prompt.endswith("<think>\n\n</think>\n\n")
assert trained == "<think>\n\n</think>\n\nHo!<|im_end|>"
prompt, trained = show(renderers.GLM45RendererConfig())
assert prompt.endswith("<|assistant|>") and trained == "<think></think>\nHo!<|endoftext|>"
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py"

#!/usr/bin/env bash
# Guess: `Llama.create_chat_completion` of llama-cpp-python writes a conversation by the chat template in
#   the GGUF file, as llama.cpp's own programs and transformers do.
#
# Truth: llama-cpp-python 0.3.36 compares the template with the texts of four published ones. For these, it
#   calls functions of its own, which write other prompts. For ChatML's, a conversation without a system
#   message begins with an empty one. For Mistral 7B Instruct's, a system message is left out, where the
#   template raises an error, and answers end with `</s>` whatever the end token of the file is. For Llama 3's,
#   spaces around a message stay, which the template removes. A comment before the template makes it another
#   text, which is rendered.
#
# What a trainer must do: write a comment before these templates in GGUF, and compare the tokens that a
#   runtime computes, not only the template in the file.
#
# llama-cpp-python is compiled, for a quarter of an hour; LLAMA_CPP_PYTHON names a folder that has it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q gguf==0.19.0 numpy diskcache==5.6.3 jinja2 typing-extensions
packages=${LLAMA_CPP_PYTHON:-$folder/packages}
if [ ! -d "$packages" ]; then
    "$folder/venv/bin/pip" install -q --no-deps --target "$packages" llama-cpp-python==0.3.36
fi
cat > "$folder/try.py" <<'PYTHON'
import sys

import gguf
import llama_cpp
from llama_cpp import llama_chat_format as formats

folder = sys.argv[1]
TOKENS = ["<unk>", "<s>", "</s>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
TYPES = [2, 3, 3, 3, *[6] * 256, 1]
SIZES = {"context_length": 512, "embedding_length": 32, "block_count": 1, "feed_forward_length": 64}


def prompt_of(template, conversation):
    """Return what `create_chat_completion` computes, as text."""
    writer = gguf.GGUFWriter(f"{folder}/m.gguf", "llama")
    for name, value in SIZES.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types(TYPES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(3)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = llama_cpp.Llama(f"{folder}/m.gguf", vocab_only=True, verbose=False)
    seen = []

    def remember(prompt, **options):
        seen.append(model.detokenize(prompt, special=True).decode())
        raise StopIteration

    model.create_completion = remember
    try:
        model.create_chat_completion(conversation)
    except StopIteration:
        pass
    return model.chat_format, seen[0]


USER = [{"role": "user", "content": "Hi "}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]
CASES = {
    "ChatML": (formats.CHATML_CHAT_TEMPLATE, USER, "<|im_start|>system\n<|im_end|>\n"),
    "Mistral": (formats.MISTRAL_INSTRUCT_CHAT_TEMPLATE, SYSTEM, "<s>[INST] Hi "),
    "Llama 3": (formats.LLAMA3_INSTRUCT_CHAT_TEMPLATE, USER, "Hi <|eot_id|>"),
}
print(f"llama-cpp-python {llama_cpp.__version__}")
for name, (template, conversation, part) in CASES.items():
    chat_format, prompt = prompt_of(template, conversation)
    print(f"{name}: {chat_format}, {prompt!r}")
    assert chat_format != "chat_template.default" and part in prompt, "the behavior has changed"
    assert "Be brief" not in prompt, "the behavior has changed"
    try:
        chat_format, rendered = prompt_of("{# #}" + template, conversation)
    except Exception as error:
        rendered, chat_format = f"an error: {error}", "chat_template.default"
    print(f"  with a comment: {chat_format}, {rendered!r}")
    assert chat_format == "chat_template.default" and part not in rendered
PYTHON
PYTHONPATH="$packages" "$folder/venv/bin/python" "$folder/try.py" "$folder"

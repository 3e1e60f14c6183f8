#!/usr/bin/env bash
# Guess: transformers loads every tensor of a GGUF file of a supported architecture, or says which
#   one it does not use. llama.cpp adds the biases of queries, keys and values if the file has them.
#
# Truth: transformers 5.23 builds the model from the metadata, which have no key for biases, and skips
#   `blk.N.attn_q.bias` of the architecture `llama`. The model loads, and its logits are those of a
#   model without biases.
#
# What a trainer must do: compare an export of a model with biases in llama.cpp itself, and not take
#   transformers' reading of a GGUF file for the model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0
cat > "$folder/try.py" <<'PYTHON'
import sys

import gguf
import numpy as np
import torch
import transformers

print("transformers", transformers.__version__)
folder, width, n_tokens = sys.argv[1], 32, 64
random = np.random.default_rng(0)
shapes = {"token_embd.weight": (n_tokens, width), "output_norm.weight": (width,)}
shapes |= {"blk.0.attn_norm.weight": (width,), "blk.0.ffn_norm.weight": (width,)}
for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
    shapes[f"blk.0.{name}.weight"] = (width, width)
tensors = {name: random.normal(size=shape, scale=0.3).astype("f") for name, shape in shapes.items()}
BIASES = {f"blk.0.attn_{name}.bias": np.full(width, 2.0, dtype="f") for name in "qkv"}


def logits(file, tensors):
    writer = gguf.GGUFWriter(f"{folder}/{file}", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_tokens)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file)
    with torch.no_grad():
        return model(torch.arange(10)[None]).logits


without, with_biases = logits("plain.gguf", tensors), logits("biases.gguf", tensors | BIASES)
difference = (without - with_biases).abs().max().item()
print(f"largest difference of logits with and without biases: {difference}")
assert difference == 0 and without.std() > 0.01
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder"

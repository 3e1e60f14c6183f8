#!/usr/bin/env bash
# Guess: `save_pretrained` of a class writes the tensors that a published folder has, so that each
#   convolution of OLMo Hybrid's linear attention has as many rows as the projection before it.
#
# Truth: transformers 5.23 joins the convolutions of queries, keys and values to one when it reads
#   them, and cuts this one into three equal parts when it writes. With values wider than keys, as in
#   the default configuration, `q_conv1d` gets rows of keys and `k_conv1d` rows of values. Reading
#   the folder back with transformers gives the same model, since it joins the parts again; what reads
#   the three tensors by their names gets wrong shapes.
#
# What a trainer must do: compare the rows of each convolution with its projection when it reads such
# a folder, and cut by the widths of queries, keys and values when it writes one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 safetensors
"$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import sys
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__)
torch.manual_seed(0)
config = CONFIG_MAPPING["olmo_hybrid"](
    vocab_size=64,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
)
model = AutoModelForCausalLM.from_config(config).eval()
model.save_pretrained(sys.argv[1])
(file,) = Path(sys.argv[1]).glob("*.safetensors")
rows = {}
with safe_open(file, framework="pt") as tensors:
    for part in "qkv":
        for kind in ("proj", "conv1d"):
            name = f"model.layers.0.linear_attn.{part}_{kind}.weight"
            rows[f"{part}_{kind}"] = tensors.get_slice(name).get_shape()[0]
print("rows in the saved file:", rows)
assert [rows[f"{part}_proj"] for part in "qkv"] == [16, 16, 32]
assert [rows[f"{part}_conv1d"] for part in "qkv"] == [22, 22, 20]
again = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokens = torch.arange(3, 20)[None]
with torch.no_grad():
    assert torch.equal(model(tokens).logits, again(tokens).logits)
print("as described")
PYTHON

#!/usr/bin/env bash
# Guess: model.to(torch.bfloat16) is the model that from_pretrained(folder, dtype=torch.bfloat16)
#   opens: their parameters are equal.
#
# Truth: `to` also rounds the frequencies of rotary positions (`rotary_emb.inv_freq`, a buffer that is
#   not saved), which transformers 5.23 keeps in float32 when it opens a folder. A frequency is off by
#   up to 0.4 %, and an angle by that times the position: after some thousand tokens, the angles have
#   nothing to do with those of the pretrained model. Saved and opened again, the model is another one
#   than the one that was trained or evaluated.
#
# What a trainer must do: cast parameters only, never a whole model with `to`, `half` or `bfloat16`;
#   after a cast, set inv_freq again.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cat > "$folder/try.py" <<'PYTHON'
import sys

import torch
import transformers

print("transformers", transformers.__version__)
CONFIG = transformers.LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, max_position_embeddings=8192, pad_token_id=None,
)
torch.manual_seed(0)
folder = sys.argv[1]
transformers.LlamaForCausalLM(CONFIG).save_pretrained(folder)
CLASS = transformers.LlamaForCausalLM
opened = CLASS.from_pretrained(folder, dtype=torch.bfloat16)
cast = CLASS.from_pretrained(folder, dtype=torch.float32).to(torch.bfloat16)
pairs = zip(opened.parameters(), cast.parameters(), strict=True)
assert all(torch.equal(one, other) for one, other in pairs)
for name, model in {"opened": opened, "cast": cast}.items():
    print(f"inv_freq of the {name} model: {model.model.rotary_emb.inv_freq.dtype}")
assert opened.model.rotary_emb.inv_freq.dtype == torch.float32
assert cast.model.rotary_emb.inv_freq.dtype == torch.bfloat16
hidden, positions = torch.zeros(1, 8192, 128), torch.arange(8192)[None]
expected = opened.model.rotary_emb(hidden, positions)[0][0]
found = cast.model.rotary_emb(hidden, positions)[0][0]
errors = {at: (found[:at] - expected[:at]).abs().max().item() for at in (16, 128, 1024, 8192)}
print("largest error of a cosine up to a position:", {at: round(e, 3) for at, e in errors.items()})
assert errors[16] < 0.05 < 1 < errors[8192]
cast.save_pretrained(f"{folder}/again")
again = CLASS.from_pretrained(f"{folder}/again", dtype=torch.bfloat16)
assert torch.equal(again.model.rotary_emb(hidden, positions)[0][0], expected)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder/model"

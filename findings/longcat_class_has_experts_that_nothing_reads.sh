#!/usr/bin/env bash
# Guess: transformers 5's class of LongCat-Flash has the weights of the published folder, whose
# zero-computation experts return their input and have no weights.
#
# Truth: transformers 5.23 allocates gate_up_proj for the zero-computation experts too, but not
# down_proj. LongCat-Flash-Chat (512 experts and 256 without weights in each of 28 layers, 562 B
# parameters) has 741 B parameters as a class; nothing reads 180 B of them. save_pretrained writes
# gate_proj and up_proj of experts that have no down_proj, and from_pretrained refuses a folder with
# the weights of the 512 experts, as published: the sizes of gate_up_proj differ.
#
# What a trainer must do: count and divide the rows of gate_up_proj that down_proj has, and read and
# write these only.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

print("transformers", transformers.__version__)
N_EXPERTS, N_ZERO = 4, 2
config = transformers.LongcatFlashConfig(
    vocab_size=64, hidden_size=32, ffn_hidden_size=48, expert_ffn_hidden_size=16, num_layers=1,
    num_hidden_layers=2, num_attention_heads=2, q_lora_rank=16, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, head_dim=8, moe_topk=2,
    n_routed_experts=N_EXPERTS, zero_expert_num=N_ZERO,
)
torch.manual_seed(0)
model = transformers.LongcatFlashForCausalLM(config).eval()
experts = model.model.layers[0].mlp.experts
print("gate_up_proj of", len(experts.gate_up_proj), "experts, down_proj of", len(experts.down_proj))
assert (len(experts.gate_up_proj), len(experts.down_proj)) == (N_EXPERTS + N_ZERO, N_EXPERTS)

tokens = torch.arange(60)[None]
before = model(tokens).logits
with torch.no_grad():
    experts.gate_up_proj[N_EXPERTS:] = torch.nan
assert torch.equal(model(tokens).logits, before)
print("not a number in the rows of zero-computation experts changes no logit")

path = pathlib.Path(sys.argv[1]) / "model"
model.save_pretrained(path)
weights = load_file(path / "model.safetensors")
extra = [name for name in weights if any(f"experts.{i}." in name for i in (4, 5))]
print("written for zero-computation experts:", sorted(extra))
assert len(extra) == 2 * N_ZERO
published = {name: weight for name, weight in weights.items() if name not in extra}
save_file(published, path / "model.safetensors", metadata={"format": "pt"})
try:
    transformers.LongcatFlashForCausalLM.from_pretrained(path)
except RuntimeError as error:
    print("from_pretrained without them:", error)
else:
    raise SystemExit("read without them; the behavior has changed")
print("as described")
PYTHON

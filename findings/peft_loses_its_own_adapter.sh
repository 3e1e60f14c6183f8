#!/usr/bin/env bash
# Guess: the adapter that peft opens is the one that it saved: its tensors have the names of the
# model's modules.
#
# Truth: when peft 0.21 opens an adapter, it renames the tensors by the rules with which
# transformers 5 reads old files of the base model. A rule that also matches a new name moves the
# tensor away. laguna's rule for old files makes `mlp.shared_experts.` of `mlp.shared_expert.`,
# where the last dot is any character, so that `mlp.shared_experts.up_proj` becomes
# `mlp.shared_experts..up_proj`. These adapters keep their initial values (B = 0), and peft only
# warns of missing keys. deepseek_ocr2 loses all adapters like that, and inkling2 those of
# convolutions.
#
# What a trainer must do: apply transformers' rules (`core_model_loading.rename_source_key`) to the
# names that it is about to write, and refuse adapters of layers whose names change; treat peft's
# warning of missing keys as an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
cat > "$folder/try.py" <<'PYTHON'
import sys
import warnings

import peft
import torch
import transformers

print("peft", peft.__version__, "transformers", transformers.__version__)
folder = sys.argv[1]
CONFIG = transformers.LagunaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    layer_types=["full_attention"] * 2, num_attention_heads_per_layer=[4, 4],
    mlp_layer_types=["dense", "sparse"], pad_token_id=None, bos_token_id=None, eos_token_id=None,
)
TOKENS = torch.arange(1, 20)[None]
torch.manual_seed(0)
transformers.LagunaForCausalLM(CONFIG).save_pretrained(f"{folder}/base")


def base():
    return transformers.LagunaForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.float32)


LAYERS = [f"model.layers.1.mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")]
saved = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=LAYERS)).eval()
for name, parameter in saved.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter)
saved.save_pretrained(f"{folder}/adapter")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    opened = peft.PeftModel.from_pretrained(base(), f"{folder}/adapter").eval()
with torch.no_grad():
    models = {"saved": saved, "opened": opened, "base": base().eval()}
    logits = {name: model(TOKENS).logits for name, model in models.items()}
largest = logits["saved"].abs().max()
lost = ((logits["opened"] - logits["saved"]).abs().max() / largest).item()
left = ((logits["opened"] - logits["base"]).abs().max() / largest).item()
print(f"opened against saved: {lost:.1%} of the largest logit")
print(f"opened against the base without adapter: {left:.1%}")
print([str(warning.message)[:120] for warning in caught if "missing" in str(warning.message)])
assert lost > 0.01 and left == 0
assert any("missing adapter keys" in str(warning.message) for warning in caught)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder"

#!/usr/bin/env bash
# Guess: a LoRA whose target_modules are full names, or a regular expression, adapts these layers
# and no others.
#
# Truth: for a class whose experts transformers 5 fused (glm4_moe, deepseek_v3, qwen3_moe, olmoe,
# …), peft 0.21 converts target_modules as if transformers 4 had written them. It takes every name
# that ends with gate_proj, up_proj, down_proj or gate for the experts of all layers, and drops it.
# `model.layers.0.mlp.gate_proj` (a dense network) is not adapted; experts, which nobody named, are.
# A regular expression becomes the set of the last names that it matches, so that one for q_proj of
# layer 0 adapts q_proj of all layers.
#
# What a trainer must do: write such layers as target_parameters
# (`model.layers.0.mlp.gate_proj.weight`), which peft leaves as they are and whose tensors have the
# same names; write other layers as full names, not as a regular expression; refuse DoRA and dropout
# of the former, which target_parameters do not have.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
"$folder/venv/bin/python" - <<'PYTHON'
import peft
import torch
import transformers

print("peft", peft.__version__, "transformers", transformers.__version__)
CONFIG = transformers.Glm4MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
    pad_token_id=None,
)
DENSE = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]


def adapted(**options):
    """Return the modules that get an adapter."""
    torch.manual_seed(0)
    model = transformers.Glm4MoeForCausalLM(CONFIG)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, **options))
    names = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    modules = {name.partition(".lora_A")[0] for name in names}
    return sorted(module.removeprefix("base_model.model.") for module in modules)


full_names = adapted(target_modules=DENSE)
expression = adapted(target_modules=r"model\.layers\.0\.self_attn\.q_proj")
parameters = adapted(target_modules=[], target_parameters=[f"{name}.weight" for name in DENSE])
print("full names of a dense network:", full_names)
print("expression for q_proj of layer 0:", expression)
print("target_parameters of the dense network:", parameters)
assert not set(full_names) & set(DENSE) and any(".experts" in name for name in full_names)
assert expression == [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
assert parameters == sorted(DENSE)
print("as described")
PYTHON

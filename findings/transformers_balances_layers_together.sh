#!/usr/bin/env bash
# Guess: the auxiliary loss of a class's routers (output_router_logits) is largest if every layer
#   sends all tokens to one expert, and its gradients spread them.
#
# Truth: transformers 5.23 concatenates the tokens of all layers, and compares loads and probabilities
#   of the whole. If each layer uses one expert only, and each layer another one, the loss is that of
#   perfect balance, and its gradients are zero. Mixtral, Qwen3-MoE, OLMoE and gpt-oss share this.
#
# What a trainer must do: average the loss over layers if it trains routers, as the papers do; with
#   this loss, watch the load of each layer's experts, since the loss does not show a collapsed layer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmoe import modeling_olmoe
from transformers.models.qwen3_moe import modeling_qwen3_moe

print("transformers", transformers.__version__)
EXPERTS = 4
MODULES = (modeling_mixtral, modeling_qwen3_moe, modeling_olmoe, modeling_gpt_oss)


def loss_and_gradient(module, chosen):
    """Return the loss of layers that send all tokens to one expert each, and its gradient's norm."""
    layers = [4.0 * torch.eye(EXPERTS)[expert].repeat(16, 1) for expert in chosen]
    layers = tuple(logits.requires_grad_() for logits in layers)
    loss = module.load_balancing_loss_func(layers, EXPERTS, 1)
    loss.backward()
    return loss.item(), sum(logits.grad.norm().item() for logits in layers)


for module in MODULES:
    same = loss_and_gradient(module, [0] * EXPERTS)
    different = loss_and_gradient(module, range(EXPERTS))
    name = module.__name__.rpartition(".")[2]
    print(f"{name}: loss and gradient {same} of one expert, {different} of one per layer")
    assert same[0] > 3 and same[1] > 0.01
    assert abs(different[0] - 1) < 1e-5 and different[1] < 1e-6

config = transformers.MixtralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=EXPERTS,
    num_experts_per_tok=2, output_router_logits=True,
)
torch.manual_seed(0)
tokens = torch.randint(64, (2, 16))
outputs = transformers.MixtralForCausalLM(config)(tokens, labels=tokens)
whole = modeling_mixtral.load_balancing_loss_func(outputs.router_logits, EXPERTS, 2)
layers = [
    modeling_mixtral.load_balancing_loss_func((logits,), EXPERTS, 2).item()
    for logits in outputs.router_logits
]
print(f"Mixtral's loss {outputs.aux_loss.item():.4f}; mean of its layers' {sum(layers) / 3:.4f}")
torch.testing.assert_close(outputs.aux_loss, whole)
assert abs(sum(layers) / 3 - whole.item()) > 1e-3
print("as described")
PYTHON

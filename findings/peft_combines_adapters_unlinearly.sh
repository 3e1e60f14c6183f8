#!/usr/bin/env bash
# Guess: add_weighted_adapter(["a", "b"], [1, 1], "sum", combination_type="linear") makes an adapter
#   that changes the weights by the sum of what both change, and with weights [1, 0], by what "a"
#   changes.
#
# Truth: in peft 0.21, "linear" (its default is "svd") adds the matrices A and the matrices B, so that
#   the product has cross terms: (B1 + B2)(A1 + A2). For unrelated adapters, these are half of it.
#   "cat" and "svd" are right for plain LoRA. For rsLoRA, all three types are wrong, also for [1, 0]:
#   the new adapter has alpha = r, which rsLoRA divides by the square root of r, so that the change is
#   too large by the square root of the new rank.
#
# What a trainer must do: combine the products B @ A with each adapter's own scale, and compare the
#   combined change with the sum before the weights are saved.
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
CONFIG = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=4, pad_token_id=None,
)


def factor(kind, weights, rslora):
    """Return the size of the combined change over the sum's, and the cosine between both."""
    torch.manual_seed(0)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": rslora}
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(CONFIG), peft.LoraConfig(**options), adapter_name="first"
    )
    model.add_adapter("second", peft.LoraConfig(**options))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    pairs = zip(("first", "second"), weights, strict=True)
    expected = sum(weight * layer.get_delta_weight(name) for name, weight in pairs)
    rank = {"svd_rank": 8} if kind == "svd" else {}
    model.add_weighted_adapter(["first", "second"], weights, "sum", combination_type=kind, **rank)
    found = layer.get_delta_weight("sum")
    cosine = torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0)
    return (found.norm() / expected.norm()).item(), cosine.item()


for rslora in (False, True):
    for kind in ("linear", "cat", "svd"):
        for weights in ([1.0, 1.0], [1.0, 0.0]):
            size, cosine = factor(kind, weights, rslora)
            name = "rsLoRA" if rslora else "LoRA"
            print(f"{name}, {kind}, {weights}: {size:.3f} times as large, cosine {cosine:.3f}")
            is_crossed = kind == "linear" and weights[1] > 0
            assert cosine < 0.9 if is_crossed else cosine > 0.999
            rank = 4 if kind == "linear" else 8
            right = rank**0.5 if rslora else 1
            assert is_crossed or abs(size / right - 1) < 1e-3
print("as described")
PYTHON

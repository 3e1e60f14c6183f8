#!/usr/bin/env bash
# Guess: with `disable_adapter()`, a model of peft computes as its base model, and `unload()` returns
#   the base model. So neither DPO nor a KL penalty needs a second copy as its reference.
#
# Truth: peft 0.21 takes the initial adapter out of the base weights for init_lora_weights "pissa",
#   "pissa_niter_*" and "olora". Without the adapter, the model computes with the rest, which no one
#   trained: a reference at step 0 differs from the policy at step 0. `unload()` returns the rest as
#   well, and it leaves the trained copies of `modules_to_save` in the model. No warning is given.
#
# What a trainer must do: keep such a base apart as the reference, or refuse these initial values if
#   the reference is the model without its adapter; never save what `unload()` returns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
cat > "$folder/try.py" <<'PYTHON'
import warnings

import peft
import torch
import transformers

print("peft", peft.__version__, "transformers", transformers.__version__)
CONFIG = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, pad_token_id=None,
)
TOKENS = torch.arange(1, 20)[None]


def base():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(CONFIG).eval()


@torch.no_grad()
def distance(model):
    """Return the largest difference to the base model's log-probabilities."""
    expected = base()(TOKENS).logits.log_softmax(-1)
    return (model(TOKENS).logits.log_softmax(-1) - expected).abs().max().item()


def adapt(**options):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options)
    return peft.get_peft_model(base(), config).eval()


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for initial in (True, "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora"):
        model = adapt(init_lora_weights=initial)
        at_start = distance(model)
        with model.disable_adapter():
            disabled = distance(model)
        unloaded = distance(model.unload())
        print(f"{initial}: {at_start:.1e} at the start, {disabled:.1e} disabled, {unloaded:.1e} unloaded")
        takes_out = initial in ("pissa", "pissa_niter_4", "olora")
        assert at_start < 1e-5 and (min(disabled, unloaded) > 1e-3) == takes_out
        assert takes_out or max(disabled, unloaded) < 1e-5
    model = adapt(modules_to_save=["lm_head"])
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.normal_(parameter)
    with model.disable_adapter():
        disabled = distance(model)
    unloaded = distance(model.unload())
print(f"modules_to_save: {disabled:.1e} disabled, {unloaded:.1e} unloaded")
assert disabled == 0 and unloaded > 1
about = [str(one.message) for one in caught if "base" in str(one.message).lower()]
print("warnings about the base:", about)
assert not about
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py"

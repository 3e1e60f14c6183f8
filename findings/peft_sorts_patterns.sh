#!/usr/bin/env bash
# Guess: an adapter with `rank_pattern` and `alpha_pattern` is opened as it was saved:
# adapter_config.json has the same patterns, and the first that matches a module counts.
#
# Truth: peft 0.21 writes adapter_config.json with sorted keys, so where several patterns match a
# module, another one counts when the adapter is opened. With alpha_pattern, the adapter has another
# scale, without a word; with rank_pattern, opening fails, since the shapes differ.
#
# What a trainer must do: write patterns of which at most one value fits each module, so that their
# order does not matter, and read patterns in the order of the file, which is how peft opens it.
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
CONFIG = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, pad_token_id=None,
)
TOKENS = torch.arange(1, 20)[None]
torch.manual_seed(0)
transformers.LlamaForCausalLM(CONFIG).save_pretrained(f"{folder}/base")


def base():
    return transformers.LlamaForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.float32)


def save(name, **patterns):
    options = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj"], **patterns)
    model = peft.get_peft_model(base(), options).eval()
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(f"{folder}/{name}")
    return model


NAMES = ("q_proj", ".*_proj")
saved = save("alpha", alpha_pattern={NAMES[0]: 32, NAMES[1]: 2})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    opened = peft.PeftModel.from_pretrained(base(), f"{folder}/alpha").eval()
with torch.no_grad():
    expected, logits = saved(TOKENS).logits, opened(TOKENS).logits
difference = ((logits - expected).abs().max() / expected.abs().max()).item()
about = [str(warning.message) for warning in caught if "pattern" in str(warning.message)]
print(f"alpha_pattern: {difference:.1%} of the largest logit")
print("patterns in the file:", opened.peft_config["default"].alpha_pattern)
print("warnings about patterns:", about)
assert difference > 0.01 and not about
assert list(opened.peft_config["default"].alpha_pattern) == sorted(NAMES)

save("rank", rank_pattern={NAMES[0]: 8, NAMES[1]: 2})
try:
    peft.PeftModel.from_pretrained(base(), f"{folder}/rank")
except RuntimeError as error:
    print("rank_pattern:", str(error).splitlines()[1].strip()[:150])
else:
    raise AssertionError("peft opened the adapter")
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder"

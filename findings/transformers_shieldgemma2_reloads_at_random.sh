#!/usr/bin/env bash
# Guess: a model that `AutoModelForImageTextToText` built and saved is the same after
#   `AutoModelForImageTextToText.from_pretrained`; weights that do not fit raise an error.
#
# Truth: for ShieldGemma 2, transformers 5.23 builds the class of Gemma 3, and renames its weights as
#   those of the classifier around it, once more when it writes. `from_pretrained` of the written
#   folder finds no weight of the language model, draws all of them at random, and logs a table.
#   With the class of the classifier, writing and reading give the same model.
#
# What a trainer must do: not train this type by its class for images and text, and compare the names
# of weights in a folder with those of the model before it reads any.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 pillow
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys

import torch
import transformers
from transformers import AutoModelForImageTextToText, ShieldGemma2Config
from transformers import ShieldGemma2ForImageClassification

transformers.logging.set_verbosity_error()
print("torch", torch.__version__, "transformers", transformers.__version__)
sizes = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
config = ShieldGemma2Config(
    text_config={**sizes, "model_type": "gemma3_text", "vocab_size": 64, "head_dim": 8}
    | {"num_key_value_heads": 2},
    vision_config={**sizes, "model_type": "siglip_vision_model", "image_size": 32}
    | {"patch_size": 8},
    mm_tokens_per_image=4,
    image_token_index=60,
)
config.text_config.pad_token_id = 0
tokens = torch.arange(2, 20)[None]


def changes(first, saved, read):
    """Return the largest change of the logits of the language model by writing and reading."""
    first.save_pretrained(saved)
    models = [first.eval(), read(saved).eval()]
    inner = [one.model if hasattr(one.model, "lm_head") else one for one in models]
    with torch.no_grad():
        logits = [one(input_ids=tokens).logits for one in inner]
    return float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())


torch.manual_seed(0)
found = {}
for name, first, cls in (
    ("images and text", AutoModelForImageTextToText.from_config(config), AutoModelForImageTextToText),
    ("classifier", ShieldGemma2ForImageClassification(config), ShieldGemma2ForImageClassification),
):
    found[name] = changes(first, f"{sys.argv[1]}/{name}", cls.from_pretrained)
    print(f"{name}: logits change by {found[name]:.1e} of the largest")
assert found["images and text"] > 0.1
assert found["classifier"] < 1e-6
print("as described")
PYTHON

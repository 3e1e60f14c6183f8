#!/usr/bin/env bash
# Guess: in Llama 3.2's class in transformers, a token reads the images that `cross_attention_mask`
#   lets it read; tokens before an image read none, and a row does not depend on other rows.
#
# Truth: a token whose mask is all 0 reads all places of images of its row, each with the same
#   weight: also the images after it, and the padding that the row gets since another row has more
#   images. Only the gated MLP after that attention is masked. (With mask 0 everywhere, a row
#   without images differs from the same row alone.)
#
# What a trainer must do: expect that a row with images has other logits before its images, and thus
#   other gradients, beside rows with more images; compare batches of the same rows only.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 numpy==2.3.5
cat > "$folder/read.py" <<'PYTHON'
import torch
import transformers
from transformers import MllamaConfig, MllamaForConditionalGeneration

text = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "cross_attention_layers": [1],
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
vision = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "attention_heads": 4,
    "num_global_layers": 1, "intermediate_layers_indices": [0], "vision_output_dim": 64,
    "image_size": 32, "patch_size": 8,
}
torch.manual_seed(0)
config = MllamaConfig(text_config=text, vision_config=vision, image_token_index=63)
model = MllamaForConditionalGeneration(config).eval()
with torch.no_grad():
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
        elif parameter.numel() == 1:
            parameter.fill_(0.5)
PLACE, LENGTH = 5, 12  # of the image's token
tokens = torch.randint(3, 60, (1, LENGTH))
tokens[0, PLACE] = 63


def logits(pixels, n_images):
    """Return the logits of a row with one image, padded to `n_images`."""
    padded = torch.zeros(1, n_images, 4, 3, 32, 32)
    padded[0, 0, 0] = pixels
    ids = torch.zeros(1, n_images, dtype=torch.long)
    ids[0, 0] = 1
    tiles = torch.zeros(1, n_images, 4, dtype=torch.long)
    tiles[:, :, 0] = 1
    mask = torch.zeros(1, LENGTH, n_images, 4, dtype=torch.long)
    mask[0, PLACE:, 0, 0] = 1
    inputs = {"pixel_values": padded, "aspect_ratio_ids": ids, "aspect_ratio_mask": tiles}
    with torch.no_grad():
        return model(input_ids=tokens, cross_attention_mask=mask, **inputs).logits[0]


def change(one, other):
    return float((one - other).abs().max() / one.abs().max())


one, other = torch.randn(2, 3, 32, 32)
reference = logits(one, 1)
pixels, padding = logits(other, 1), logits(one, 2)
print("torch", torch.__version__, "transformers", transformers.__version__)
print(f"other pixels: logits before the image change by {change(reference[:PLACE], pixels[:PLACE]):.1e}")
print(f"padding for a second image: before by {change(reference[:PLACE], padding[:PLACE]):.1e}")
assert change(reference[:PLACE], pixels[:PLACE]) > 1e-2
assert change(reference[:PLACE], padding[:PLACE]) > 1e-2
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/read.py"

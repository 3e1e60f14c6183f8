#!/usr/bin/env bash
# Guess: Emu3's class freezes its tokenizer of images ("self.eval()  # Emu3's VQ model is frozen"),
#   so an image has the same codes in training as in generation, whatever else is in the batch.
#
# Truth: model.train() reverses that eval(), and the tokenizer has batch normalization. In training,
#   the codes of an image depend on the other images of the batch, and each forward pass moves the
#   running statistics, so that the saved tokenizer gives other codes than the published one.
#
# What a trainer must do: leave modules that a class builds in evaluation mode in this mode.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 torch==2.14.1 pillow==13.0.0
cat > "$folder/codes.py" <<'PYTHON'
import torch
from transformers import Emu3VQVAE, Emu3VQVAEConfig

torch.manual_seed(0)
config = Emu3VQVAEConfig(
    codebook_size=16,
    base_channels=32,
    hidden_size=32,
    channel_multiplier=[1, 1, 1, 1],
    num_res_blocks=1,
)
model = Emu3VQVAE(config)
print("built in training mode:", model.training)
images = torch.randn(4, 3, 64, 64)
sizes = torch.tensor([[64, 64]] * 4)
for mode in ("as built", "after train()"):
    if mode == "after train()":
        model.train()
    with torch.no_grad():
        alone = model.encode(images[:1], sizes[:1]).image_tokens[0]
        together = model.encode(images, sizes).image_tokens[0]
    different = int((alone != together).sum())
    print(f"{mode}: {different} of {alone.numel()} codes of an image change with its batch")
norm = next(one for one in model.modules() if isinstance(one, torch.nn.BatchNorm3d))
print("updates of the running statistics:", int(norm.num_batches_tracked))
PYTHON
"$folder/venv/bin/python" "$folder/codes.py" 2> /dev/null

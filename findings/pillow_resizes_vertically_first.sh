#!/usr/bin/env bash
# Guess: an image processor that computes with Pillow gives the same pixels with each version of
#   Pillow, or differs by the rounding of a step of 8 bits.
#
# Truth: Pillow resizes in two passes, and rounds to 8 bits between them. Up to 12.2, the horizontal
#   pass is first; in 13.0, the vertical one is for some sizes, such as a result that is wider and
#   less high. The processor of Qwen2-VL to Qwen3.5 makes 644 x 476 of the usual 640 x 480 pixels:
#   sharp edges change by up to 16 of 255 steps, noise by more than 20, with no change of settings,
#   transformers, or shapes. torchvision 0.29 has the order of Pillow 12.
#
# What a trainer must do: count the version of Pillow among what decides pixel values, so that a
# cache or a resumed run does not mix them unseen.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 numpy==2.3.5
for version in 12.2.0 13.0.0; do
    "$folder/venv/bin/pip" install -q --no-deps --target "$folder/$version" "pillow==$version"
done
cat > "$folder/read.py" <<'PYTHON'
import sys

import numpy as np
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

x, y = np.meshgrid(np.arange(640), np.arange(480))
images = {
    "edges": np.repeat(255 * ((x // 7 + y // 5) % 2)[..., None], 3, -1),
    "noise": np.random.default_rng(0).integers(0, 256, (480, 640, 3)),
}
found = {}
for name, values in images.items():
    processor = Qwen2VLImageProcessorPil()
    image = Image.fromarray(values.astype(np.uint8))
    outputs = processor(image, do_normalize=False, return_tensors="np")
    found[name] = outputs["pixel_values"] * 255
    found[f"{name} grid"] = outputs["image_grid_thw"]
    resized = image.resize((644, 476), Image.Resampling.BICUBIC)
    for first, size in (("horizontal", (644, 480)), ("vertical", (640, 476))):
        between = image.resize(size, Image.Resampling.BICUBIC)
        if resized == between.resize((644, 476), Image.Resampling.BICUBIC):
            print(f"  {name}: {first} pass first")
if len(sys.argv) > 2:
    before = np.load(sys.argv[2])
    for name in images:
        steps = np.abs(found[name] - before[name])
        assert (found[f"{name} grid"] == before[f"{name} grid"]).all()
        print(f"  {name}: up to {steps.max():.0f} of 255 steps, {steps.mean():.2f} on average")
np.savez(sys.argv[1], **found)
PYTHON
for version in 12.2.0 13.0.0; do
    echo "Pillow $version"
    before=$([[ $version == 12.2.0 ]] || echo "$folder/12.2.0.npz")
    PYTHONPATH="$folder/$version" "$folder/venv/bin/python" "$folder/read.py" "$folder/$version.npz" ${before:+"$before"} 2>/dev/null |
        tee "$folder/$version.txt"
done
grep -q "edges: horizontal pass first$" "$folder/12.2.0.txt"
grep -q "edges: vertical pass first$" "$folder/13.0.0.txt"
grep -Eq "edges: up to 1[0-9] of 255 steps, 0.[0-9]+ on average$" "$folder/13.0.0.txt"
grep -Eq "noise: up to 2[0-9] of 255 steps, 0.[0-9]+ on average$" "$folder/13.0.0.txt"
echo "as described"

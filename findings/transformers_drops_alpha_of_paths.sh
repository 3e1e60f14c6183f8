#!/usr/bin/env bash
# Guess: an image processor of transformers gives the same pixels for the path of an image as for the
#   image that Pillow opens from it.
#
# Truth: transformers 5.23 opens a path by load_image, which drops alpha: the colors under
#   transparent pixels appear, usually black. An opened image is blended with white instead. A black
#   drawing on a transparent ground is black on white for the one, and black on black for the other.
#   Chat templates with a path or URL (apply_chat_template) take the first way, datasets with decoded
#   images the second.
#
# What a trainer must do: blend with white before the processor sees the image, and do the same where
#   the model is used.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 pillow==13.0.0 numpy
"$folder/venv/bin/python" - "$folder/drawing.png" <<'PYTHON'
import sys

import numpy as np
import transformers
from PIL import Image, ImageDraw
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

path = sys.argv[1]
drawing = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
ImageDraw.Draw(drawing).line((0, 0, 31, 31), fill=(0, 0, 0, 255), width=3)
drawing.save(path)
processor = SiglipImageProcessorPil(size={"height": 32, "width": 32}, do_convert_rgb=True)
print("transformers", transformers.__version__)
means = {}
for name, image in {"path": processor.fetch_images(path), "opened": Image.open(path)}.items():
    pixels = processor(image, return_tensors="np")["pixel_values"]
    means[name] = float(np.mean(pixels))
    print(f"{name}: mean {means[name]:.2f}, from {pixels.min():.2f} to {pixels.max():.2f}")
assert means["path"] == -1 and means["opened"] > 0.5, means
print("as described")
PYTHON

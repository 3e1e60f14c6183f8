#!/usr/bin/env bash
# Guess: a processor of images takes a flat list of images, or a list for each text, and both mean
#   the same if the texts have as many image tokens.
#
# Truth: LLaVA-OneVision's (transformers 5.23) cuts an image into tiles if it is the only one of its
#   list. In a flat list, each image counts as the only one: a text with two images gets the tiles
#   of both, several times the tokens and pixels of the nested list, which chat templates pass.
#   Nothing is said, and the model trains on either.
#
# What a trainer must do: pass a list of images for each sample, also when it counts the tokens of a
# sample and when a sample has one image.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 pillow==13.0.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import transformers
from PIL import Image
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

print("transformers", transformers.__version__)
processor = LlavaOnevisionImageProcessorPil()
images = [Image.fromarray(np.full((480, 640, 3), value, np.uint8)) for value in (50, 200)]
shapes = {}
for name, given in {"flat": images, "nested": [images]}.items():
    result = processor(given, return_tensors="np")
    shapes[name] = result["pixel_values"].shape
    print(f"  {name}: pixel_values {shapes[name]}, batch_num_images {result['batch_num_images']}")
assert shapes["flat"][:2] == (2, 5) and shapes["nested"][:2] == (2, 1), shapes
print("as described")
PYTHON

#!/usr/bin/env bash
# Guess: the processor of a folder cuts images into at most `max_patches` patches, as the folder's
#   settings of the image processor say and the image processor does.
#
# Truth: `Kosmos2_5Processor` of transformers 5.23 writes and reads the setting, and its image
#   processor obeys it. The processor itself has 4,096 in its class, gives that to the image processor
#   with each call, and so ignores the setting. Only an argument of the call changes it. The model
#   gets 64 times as many patches here.
#
# What a trainer must do: read pixels by the processor, not by its image processor, and size memory by
# what the call returns, not by the files of the folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 pillow
"$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import json
import sys
from pathlib import Path

import tokenizers
import transformers
from PIL import Image
from transformers import AutoProcessor, Kosmos2_5Processor, PreTrainedTokenizerFast
from transformers.models.kosmos2_5.image_processing_pil_kosmos2_5 import (
    Kosmos2_5ImageProcessorPil,
)

transformers.logging.set_verbosity_error()
print("transformers", transformers.__version__)
names = ["<pad>", "<unk>", "<s>", "</s>", "<image>", "</image>", "bird"]
words = tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
backend = tokenizers.Tokenizer(words)
backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
backend.add_special_tokens(names[:-1])
of_images = {"boi_token": "<image>", "eoi_token": "</image>", "image_token": "<s>"}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend,
    pad_token="<pad>",
    bos_token="<s>",
    eos_token="</s>",
    unk_token="<unk>",
    extra_special_tokens=of_images,
)
image_processor = Kosmos2_5ImageProcessorPil(max_patches=64)
Kosmos2_5Processor(image_processor, tokenizer, num_image_tokens=4).save_pretrained(sys.argv[1])
written = json.loads((Path(sys.argv[1]) / "processor_config.json").read_text())
processor = AutoProcessor.from_pretrained(sys.argv[1])
image = Image.new("RGB", (64, 48))


def n_patches(outputs):
    return outputs["flattened_patches"].shape[1]


found = {
    "the file": written["image_processor"]["max_patches"],
    "the image processor": n_patches(processor.image_processor(image, return_tensors="pt")),
    "the processor": n_patches(processor(images=image, text="bird")),
    "the processor with max_patches=64": n_patches(
        processor(images=image, text="bird", max_patches=64)
    ),
}
print("max_patches of", found)
assert list(found.values()) == [64, 64, 4096, 64]
print("as described")
PYTHON

#!/usr/bin/env bash
# Guess: without torchvision, transformers takes the Pillow form of a type's image processor, and the
#   type's processor reads images with it, as it does with torchvision.
#
# Truth: Fuyu has a Pillow form, `FuyuImageProcessorPil`, and its processor is built with it without a
#   warning. It raises a TypeError for each image in transformers 5.23: it asks the image processor
#   for PyTorch tensors, whose patches the Pillow form then cuts with functions of NumPy's arrays. The
#   image processor by itself, asked for no tensors, gives arrays that it can cut.
#
# What a trainer must do: try a processor with an image before training, and cut Fuyu's patches from
# the arrays.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 pillow
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import FuyuProcessor, PreTrainedTokenizerFast
from transformers.models.fuyu.image_processing_pil_fuyu import FuyuImageProcessorPil

transformers.logging.set_verbosity_error()
print("torch", torch.__version__, "transformers", transformers.__version__)
words = ["<pad>", "|SPEAKER|", "|NEWLINE|", "<s>", "<0x04>", "q"]
vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "q"))
vocabulary.add_special_tokens(words[:-1])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>")
patch = {"height": 8, "width": 8}
reader = FuyuImageProcessorPil(size={"height": 32, "width": 32}, patch_size=patch)
processor = FuyuProcessor(reader, tokenizer)
image = Image.new("RGB", (24, 16))
message = ""
try:
    processor(images=[image], text=["q"])
except TypeError as error:
    message = str(error)
print("the processor:", message or "reads the image")
[[pixels]] = reader([image])["images"]
patches = reader.patchify_image(pixels[:, :16, :24], reader.patch_size)
print("the image processor by itself:", patches.shape)
assert "transpose()" in message
assert patches.shape == (6, 8 * 8 * 3)
print("as described")
PYTHON

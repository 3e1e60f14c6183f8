#!/usr/bin/env bash
# Guess: converting a gray PNG of 16 bits to RGB keeps its picture, as for a color PNG of 16 bits,
#   whose values become their upper 8 bits.
#
# Truth: Pillow 13 clips gray values of 16 bits at 255: all but the darkest 0.4 % of the range is
#   white. transformers 5.23 converts images by Pillow (load_image, and processors with
#   do_convert_rgb), so that X-rays, depth maps and scans become a white page, without a warning.
#
# What a trainer must do: take the upper 8 bits of modes I;16, I;16L and I;16B before the conversion.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 pillow==13.0.0 numpy
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import PIL
import transformers
from PIL import Image
from transformers.image_utils import load_image

VALUES = [0, 255, 256, 20_000, 40_000, 65_535]


def png(path, color, samples):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", len(VALUES), 1, 16, color, 0, 0, 0)
    pixels = zlib.compress(b"\0" + struct.pack(f">{len(samples)}H", *samples))
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    return str(path)


folder = Path(sys.argv[1])
print("Pillow", PIL.__version__, "transformers", transformers.__version__)
gray = png(folder / "gray.png", 0, VALUES)
color = png(folder / "color.png", 2, [value for value in VALUES for _ in range(3)])
red = {path: np.array(load_image(path))[0, :, 0].tolist() for path in (gray, color)}
opened = np.array(Image.open(gray).convert("RGB"))[0, :, 0].tolist()
print(f"values {VALUES}\ngray {red[gray]}\ncolor {red[color]}")
assert red[gray] == opened == [0, 255, 255, 255, 255, 255]
assert red[color] == [0, 0, 1, 78, 156, 255]
print("as described")
PYTHON

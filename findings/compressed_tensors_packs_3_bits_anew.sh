#!/usr/bin/env bash
# Guess: a folder that compressed-tensors wrote in the format `pack-quantized` is read by each later
#   version, or refused.
#
# Truth: up to 0.17, a word (int32) holds whole integers only: ten of 3 bits, with 2 bits unused.
#   From 0.18 on, integers continue in the next word. Format, names and configuration are the same,
#   and neither holds a version. 0.20 reads a 3-bit weight of 0.17 without a word: other values from
#   the eleventh of each row on. Widths that divide 32 (2, 4 and 8 bits) are equal in both.
#
# What a trainer must do: tell the two layouts apart by the width of a packed row (9 or 10 words for
# 96 integers of 3 bits), and refuse rows of any other width.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 pydantic==2.14.3 loguru==0.7.3 psutil==7.2.2 numpy==2.3.5
for version in 0.17.1 0.20.0; do
    "$folder/venv/bin/pip" install -q --no-deps --target "$folder/$version" "compressed-tensors==$version"
done
cat > "$folder/pack.py" <<'PYTHON'
import sys

import torch
from compressed_tensors.compressors.pack_quantized import helpers

if sys.argv[1] == "write":
    integers = (torch.arange(96) % 8 - 4).to(torch.int8)[None]
    torch.save({bits: helpers.pack_to_int32(integers, bits) for bits in (3, 4)}, sys.argv[2])
else:
    integers = (torch.arange(96) % 8 - 4).to(torch.int8)[None]
    for bits, packed in torch.load(sys.argv[2]).items():
        read = helpers.unpack_from_int32(packed, bits, torch.Size([1, 96]))
        equal = (read == integers).int()[0]
        first = 96 if equal.all() else int(equal.argmin())
        print(f"  {bits} bits: {packed.shape[1]} words, equal up to value {first}")
PYTHON
python="$folder/venv/bin/python"
for version in 0.17.1 0.20.0; do
    echo "compressed-tensors $version writes, 0.20.0 reads"
    PYTHONPATH="$folder/$version" "$python" "$folder/pack.py" write "$folder/$version.pt"
    PYTHONPATH="$folder/0.20.0" "$python" "$folder/pack.py" read "$folder/$version.pt" | tee "$folder/$version.txt"
done
grep -q "3 bits: 10 words, equal up to value 10$" "$folder/0.17.1.txt"
grep -q "4 bits: 12 words, equal up to value 96$" "$folder/0.17.1.txt"
grep -q "3 bits: 9 words, equal up to value 96$" "$folder/0.20.0.txt"
echo "as described"

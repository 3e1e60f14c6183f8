#!/usr/bin/env bash
# Guess: safetensors reads rows of any tensor that it saved (`safe_open(...).get_slice(name)[:2]`),
#   and the slice's shape is the tensor's.
#
# Truth: safetensors 0.8 counts single 4-bit values where torch's float4_e2m1fn_x2 counts pairs. A
#   tensor of shape (4, 8) is (4, 16) in the file's header and in get_shape(), and (4, 8) again after
#   get_tensor(). Every slice, even of all rows, raises RuntimeError.
#
# What a trainer must do: store 4-bit weights as uint8 (as published NVFP4 folders do) if ranks read
#   their own rows; never take sizes from the header without looking at the type.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 safetensors==0.8.0 numpy
cat >"$folder/try.py" <<'PYTHON'
import safetensors
import torch
from safetensors.torch import save_file

pairs = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
float4 = pairs.clone().view(torch.float4_e2m1fn_x2)
save_file({"uint8": pairs, "float4": float4}, "weights.safetensors")
print(f"safetensors {safetensors.__version__}, torch {torch.__version__}")
found = {}
with safetensors.safe_open("weights.safetensors", "pt") as file:
    for name in ("uint8", "float4"):
        part = file.get_slice(name)
        try:
            rows = str(tuple(part[:2].shape))
        except RuntimeError as error:
            rows = f"RuntimeError: {error}"
        found[name] = tuple(part.get_shape()), tuple(file.get_tensor(name).shape), rows
        print(f"{name}: get_shape {found[name][0]}, tensor {found[name][1]}, two rows {rows}")
assert found["uint8"] == ((4, 8), (4, 8), "(2, 8)"), found
assert found["float4"][:2] == ((4, 16), (4, 8)), found
assert found["float4"][2].startswith("RuntimeError"), found
print("as described")
PYTHON
cd "$folder" && venv/bin/python try.py

#!/usr/bin/env bash
# Guess: safetensors files are deterministic: the same tensors with the same metadata give the same
#   bytes, so a digest tells whether an export changed, and a hub stores equal files once.
#
# Truth: with safetensors 0.8, tensors are sorted, but the entries of `metadata` are written in the order
#   of a hash table with a random seed. With two or more entries, the header differs from save to save,
#   even in one process, and with it every digest of the file. With no entry or one (transformers writes
#   `format` only), the bytes are the same.
#
# What a trainer must do: compare weights by digests of their tensors, not of files, or write one entry,
#   for example a JSON object with sorted keys.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 numpy==2.3.5
cat > "$folder/try.py" <<'PYTHON'
import hashlib
import json
from importlib.metadata import version

import numpy as np
from safetensors.numpy import load, save

TENSORS = {"b": np.zeros(2, np.float32), "a": np.ones((2, 3), np.float32)}
ENTRIES = {"format": "pt", "step": "3", "model": "tiny", "run": "first", "dtype": "float32"}
SAVES = 50
METADATA = {
    "no entry": None,
    "one entry": {"format": "pt"},
    "five entries": ENTRIES,
    "five in one": {"all": json.dumps(ENTRIES, sort_keys=True)},
}
print("safetensors", version("safetensors"))
for name, metadata in METADATA.items():
    files = [save(TENSORS, metadata=metadata) for _ in range(SAVES)]
    n_digests = len({hashlib.sha256(data).digest() for data in files})
    print(f"{name}: {n_digests} different files of {SAVES}")
    assert len({len(data) for data in files}) == 1
    assert all(np.array_equal(load(files[-1])[key], TENSORS[key]) for key in TENSORS)
    assert n_digests > 10 if name == "five entries" else n_digests == 1
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py"

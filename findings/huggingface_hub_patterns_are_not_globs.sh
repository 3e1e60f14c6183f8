#!/usr/bin/env bash
# Guess: `allow_patterns` and `ignore_patterns` of snapshot_download and upload_folder are globs as in a
#   shell, git or pathlib: `*.json` names the files of the top folder, and `**/*.json` those of all
#   folders, the top one included.
#
# Truth: with huggingface_hub 2.4, it is the other way around. `*` also matches slashes, so
#   `*.safetensors` takes the copies in `fp16/` or `onnx/` as well, gigabytes that nobody asked for, and a
#   loader that reads all weights of the folder finds each tensor twice; `**/*.json` needs a slash, so it
#   leaves out the top folder's config.json, without an error. A folder's name without its slash and
#   `./config.json` match nothing.
#
# What a trainer must do: list the repository's files and choose by their whole names, or ignore
#   `*/*` beside an allowed `*.safetensors`; and fail if a needed file is missing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet huggingface_hub==2.4.0
mkdir "$folder/files"
cat > "$folder/try.py" <<'PYTHON'
from pathlib import Path

import huggingface_hub
from huggingface_hub.utils import filter_repo_objects

FILES = ["config.json", "model.safetensors", "fp16/model.safetensors", "onnx/config.json", "a/b/c.json"]
EXPECTED = [
    ({"allow_patterns": "*.safetensors"}, ["model.safetensors", "fp16/model.safetensors"]),
    ({"allow_patterns": "*.json"}, ["config.json", "onnx/config.json", "a/b/c.json"]),
    ({"allow_patterns": "**/*.json"}, ["onnx/config.json", "a/b/c.json"]),
    ({"allow_patterns": "./config.json"}, []),
    ({"allow_patterns": "onnx"}, []),
    ({"allow_patterns": "onnx/"}, ["onnx/config.json"]),
    ({"allow_patterns": "*.safetensors", "ignore_patterns": "*/*"}, ["model.safetensors"]),
]
print("huggingface_hub", huggingface_hub.__version__)
for patterns, expected in EXPECTED:
    found = list(filter_repo_objects(FILES, **patterns))
    print(patterns, found)
    assert found == expected
for name in FILES:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
by_pathlib = {pattern: sorted(map(str, Path().glob(pattern))) for pattern in ("*.json", "**/*.json")}
print("pathlib", by_pathlib)
assert by_pathlib == {"*.json": ["config.json"], "**/*.json": ["a/b/c.json", "config.json", "onnx/config.json"]}
print("as described")
PYTHON
cd "$folder/files" && "$folder/venv/bin/python" "$folder/try.py"

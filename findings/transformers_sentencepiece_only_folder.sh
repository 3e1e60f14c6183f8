#!/usr/bin/env bash
# Guess: a folder with a sentencepiece model and no tokenizer.json opens in transformers with
#   sentencepiece's ids, and the BOS that the model puts before every text.
#
# Truth: without tokenizer_class, transformers 5.23 makes a generic TokenizersBackend of the file:
#   the first word has no dummy prefix ("hi" is another token), there is no BOS, and runs of spaces
#   are merged otherwise. With tokenizer_class LlamaTokenizer the first word is right, runs of
#   spaces are still not.
#
# What a trainer must do: read such folders with sentencepiece itself, or convert them and compare
# ids on text with runs of spaces; never advise to open and save them with AutoTokenizer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# mistral-common contains the sentencepiece model of Mistral 7B.
"$folder/venv/bin/pip" install -q transformers==5.23.0 sentencepiece==0.2.3 protobuf==7.36.2 \
    mistral-common==1.13.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import importlib.util
import json
import pathlib
import shutil
import sys

import sentencepiece
import transformers

print("transformers", transformers.__version__, "sentencepiece", sentencepiece.__version__)
folder = pathlib.Path(sys.argv[1]) / "model"
folder.mkdir()
package = pathlib.Path(importlib.util.find_spec("mistral_common").origin).parent
shutil.copy(package / "data" / "tokenizer.model.v1", folder / "tokenizer.model")
reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
EXPECTED = {"hi": (False, True), "a  b": (False, False), "    x = 1": (False, False)}
found = {text: [] for text in EXPECTED}
for settings in ({}, {"tokenizer_class": "LlamaTokenizer"}):
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    print(type(tokenizer).__name__)
    for text in EXPECTED:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = reference.encode(text)
        print(f"  {text!r}: {ids}, sentencepiece {expected}")
        found[text].append(ids == expected)
    if not settings:
        assert tokenizer("hi")["input_ids"][0] != reference.bos_id()
assert {text: tuple(equal) for text, equal in found.items()} == EXPECTED
print("as described")
PYTHON

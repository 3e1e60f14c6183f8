#!/usr/bin/env bash
# Guess: gigatoken's cache of words has a limit, as that of `tokenizers` (10,000 words), so that a
#   process can tokenize any amount of text.
#
# Truth: gigatoken 0.10.0 keeps every distinct word until the tokenizer is deleted: here, 60 MB of
#   text with random words leave more than 200 MB behind. Usual text leaves about a byte per
#   character, so a process that tokenizes hundreds of GB ends for lack of memory.
#
# What a trainer must do: open the tokenizer anew after some hundred million characters, and delete
# the old one first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q gigatoken==0.10.0 awkward==2.14.0 tokenizers==0.23.3 numpy==2.3.5
cat > "$folder/try.py" <<'PYTHON'
import importlib.metadata
import os
import sys

import gigatoken
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

print("gigatoken", importlib.metadata.version("gigatoken"))
chance = np.random.default_rng(0)


def text():
    letters = chance.integers(97, 123, 2_000_000, np.uint8)
    letters[::9] = 32
    return letters.tobytes().decode()


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


reference = Tokenizer(models.BPE())
reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
reference.train_from_iterator([text()[:5000]], trainer)
fast = gigatoken.Tokenizer.from_json(reference.to_str())
fast.encode(text())
before = resident()
for _ in range(30):
    fast.encode(text())
grown = resident() - before
print(f"60 MB of text with random words: {grown:.0f} MB more")
del fast
freed = before + grown - resident()
print(f"without the tokenizer: {freed:.0f} MB less")
sys.exit(not (grown > 200 and freed > 200))
PYTHON
"$folder/venv/bin/python" "$folder/try.py"
echo "as described"

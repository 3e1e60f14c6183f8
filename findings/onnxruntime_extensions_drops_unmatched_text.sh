#!/usr/bin/env bash
# Guess: onnxruntime-extensions, the tokenizer of ONNX Runtime GenAI, reads a tokenizer.json and gives the ids
#   of `tokenizers`, or refuses what it does not know.
#
# Truth: onnxruntime-extensions 0.15.2 keeps what the pattern of a `Split` matches and drops the text between,
#   though the behavior "Isolated" keeps both. With a Split for numbers before ByteLevel, only the numbers of
#   a prompt are left. With Splits for numbers, Chinese and words in a row, as DeepSeek V3 has, words,
#   numbers and Chinese are gone, and spaces are left, since it also reads the last pattern otherwise. It does not
#   apply a normalizer: an é of two characters (file names of a Mac, much Vietnamese) is other tokens for
#   Qwen, which declares NFC. BOS of the post-processor is left out. No error or warning is given. The
#   single patterns of GPT-2, Llama 3 and Qwen give the right ids.
#
# What a trainer must do: train tokenizers with one pattern that matches all text, normalize prompts before this
#   runtime, and compare ids on words, numbers, other scripts and combining characters after an export.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tokenizers==0.23.3 onnxruntime-extensions==0.15.2 onnx numpy
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import importlib.metadata
import json
import os
import sys

from onnxruntime_extensions import pp_api
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

for package in ("tokenizers", "onnxruntime-extensions"):
    print(package, importlib.metadata.version(package))
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
NUMBERS, CHINESE = r"\p{N}{1,3}", r"[一-龥]+"
WORDS = (
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ALL = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DECODER = decoders.ByteLevel()


def split(*patterns):
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_level])


def texts_of(name, pre_tokenizer, text, normalizer=None, post_processor=None):
    """Return the text of the ids that both libraries give."""
    vocabulary = {letter: number for number, letter in enumerate(["<s>", *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    if post_processor:
        tokenizer.post_processor = post_processor
    folder = f"{sys.argv[1]}/{name}"
    os.makedirs(folder)
    tokenizer.save(f"{folder}/tokenizer.json")
    with open(f"{folder}/tokenizer_config.json", "w") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast"}, file)
    of_both = []
    for ids in (tokenizer.encode(text).ids, pp_api.Tokenizer(folder).tokenize(text)):
        letters = [tokenizer.id_to_token(int(number)) for number in ids]
        is_special = letters[:1] == ["<s>"]
        of_both.append("<s>" * is_special + DECODER.decode(letters[is_special:]))
    print(f"{name}: {of_both[0]!r} and {of_both[1]!r}")
    return of_both


TEXT = "It costs 12345 yen, 日本"
assert texts_of("one pattern", split(ALL), TEXT) == [TEXT, TEXT]
assert texts_of("numbers", split(NUMBERS), TEXT) == [TEXT, "12345"]
row = texts_of("numbers, Chinese, words", split(NUMBERS, CHINESE, WORDS), TEXT)
assert row[0] == TEXT and row[1].strip() == ""
nfc = texts_of("NFC", split(ALL), "Chloe\u0301", normalizers.NFC())
assert nfc == ["Chlo\u00e9", "Chloe\u0301"]
bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
assert texts_of("BOS", split(ALL), "It", post_processor=bos) == ["<s>It", "It"]
print("as described")
PYTHON

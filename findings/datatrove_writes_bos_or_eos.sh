#!/usr/bin/env bash
# Guess: datatrove's DocumentTokenizer ends each document with EOS, as MegatronDocumentTokenizer of the same
#   package and other tools of pre-training do, and `eos_token="</s>"` adds EOS to what the tokenizer
#   writes around a text, such as the BOS of Llama.
#
# Truth: in datatrove 0.10.1, DocumentTokenizer has no EOS by default: the documents of a `.ds` file follow each
#   other without a mark, a model trained on the file never learns to end a text, and a reader that
#   looks for EOS sees a single document. `eos_token` replaces the post-processor of
#   the tokenizer, so that it removes BOS: of a tokenizer that writes `<s> text`, a file has `<s> text` or
#   `text </s>`, not `<s> text </s>`, which the same model sees at inference and in transformers. No message
#   says so. (A tokenizer whose own post-processor writes both is right without `eos_token`.)
#
# What a trainer must do: look at the first tokens of a file that datatrove wrote; set a post-processor with
#   BOS and EOS in tokenizer.json instead of `eos_token`; take document ends from `.ds.index`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datatrove==0.10.1 tokenizers==0.23.3 numpy
"$folder/venv/bin/python" - "$folder" <<'PYTHON' 2> "$folder/log" || { cat "$folder/log"; exit 1; }
import importlib.metadata
import sys

import numpy
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer, MegatronDocumentTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

for package in ("datatrove", "tokenizers"):
    print(package, importlib.metadata.version(package))
WORDS = ["<unk>", "<s>", "</s>", "<|endoftext|>", "a", "b", "c"]
SPECIAL = [("<s>", 1), ("</s>", 2)]
runs = iter(range(100))


def written(step, template=None, **options):
    """Return what a step writes of three documents of two words."""
    tokenizer = Tokenizer(models.WordLevel(dict(zip(WORDS, range(7))), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=SPECIAL)
    tokenizer.save(f"{sys.argv[1]}/tokenizer.json")
    out = f"{sys.argv[1]}/{next(runs)}"
    rows = (Document(text=f"{word} {word}", id=word) for word in "abc")
    made = step(
        out, tokenizer_name_or_path=f"{sys.argv[1]}/tokenizer.json", save_filename="x", **options
    )
    made.run(rows, rank=0, world_size=1)
    name = "x_00000_unshuffled.ds" if step is DocumentTokenizer else "x_00000_tokens.bin"
    text = " ".join(WORDS[number] for number in numpy.fromfile(f"{out}/{name}", "uint16"))
    print(f"{step.__name__}, {template or 'plain'}, {options.get('eos_token', 'default')}: {text}")
    return text


order = {"shuffle_documents": False}
assert written(DocumentTokenizer, **order) == "a a b b c c"
assert written(DocumentTokenizer, "<s> $A", **order) == "<s> a a <s> b b <s> c c"
ended = "a a </s> b b </s> c c </s>"
assert written(DocumentTokenizer, eos_token="</s>", **order) == ended
assert written(DocumentTokenizer, "<s> $A", eos_token="</s>", **order) == ended
assert (
    written(DocumentTokenizer, "<s> $A </s>", **order)
    == "<s> a a </s> <s> b b </s> <s> c c </s>"
)
megatron = written(MegatronDocumentTokenizer)
assert megatron == "a a <|endoftext|> b b <|endoftext|> c c <|endoftext|>"
print("as described")
PYTHON

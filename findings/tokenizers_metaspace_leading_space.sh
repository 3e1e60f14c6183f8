#!/usr/bin/env bash
# Guess: the pre-tokenizer Metaspace of tokenizers does what sentencepiece's dummy prefix does: one
#   more space before every text.
#
# Truth: Metaspace adds the prefix only to text that does not begin with a space. " hi" and "hi" are
#   then one text, where sentencepiece writes two spaces and one. Two leading spaces are also split
#   otherwise.
#
# What a trainer must do: convert sentencepiece models with the normalizers Prepend and Replace
# instead, and compare the ids of text with leading spaces and runs of spaces (code, continued
# turns) with sentencepiece.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tokenizers==0.23.3 sentencepiece==0.2.3
"$folder/venv/bin/python" - <<'PYTHON'
import io

import sentencepiece
import tokenizers
from tokenizers import normalizers, pre_tokenizers

print("tokenizers", tokenizers.__version__, "sentencepiece", sentencepiece.__version__)
file = io.BytesIO()
sentences = iter(["hi there, a short text", "and hi again, a second one"] * 50)
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=sentences, model_writer=file, vocab_size=40, model_type="bpe",
    normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False,
    minloglevel=2,
)
processor = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
prefix = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
for text, is_equal in (("hi", True), (" hi", False), ("  hi", False)):
    theirs = "".join(processor.encode(text, out_type=str))
    ours = "".join(piece for piece, _ in metaspace.pre_tokenize_str(text))
    normalized = prefix.normalize_str(text)
    print(f"{text!r}: sentencepiece {theirs!r}, Metaspace {ours!r}, normalizers {normalized!r}")
    assert (theirs == ours) == is_equal
    assert theirs == normalized
print("as described")
PYTHON

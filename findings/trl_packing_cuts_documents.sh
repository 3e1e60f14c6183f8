#!/usr/bin/env bash
# Guess: with `packing=True`, TRL's SFTTrainer trains on all tokens of the texts, in full windows, as
#   packing in pre-training does: a text that is longer than a window goes on in the next one.
#
# Truth: the default of trl 1.16, packing_strategy="bfd", cuts each text at max_length, which is 1024, and
#   drops the rest without a message. Of texts of four windows, three quarters train nothing, and an
#   epoch is shorter. "bfd_split" and "wrapped" keep all tokens.
#
# What a trainer must do: split long texts over windows, or report how many tokens it drops; and count
# the tokens of an epoch before two trainers are compared by it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 trl==1.16.0 datasets==5.2.0 accelerate==1.15.0
export HF_HOME="$folder/home" HF_DATASETS_DISABLE_PROGRESS_BARS=1
cat > "$folder/try.py" <<'PYTHON'
import logging
import re
import sys
import warnings

import datasets
import tokenizers
import transformers
import trl

print("trl", trl.__version__, "transformers", transformers.__version__)
WORDS = [f"w{number}" for number in range(50)]
table = {word: number for number, word in enumerate(["<end>", "<unknown>", *WORDS])}
words = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="<unknown>"))
words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=words, eos_token="<end>", pad_token="<end>", unk_token="<unknown>"
)
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=len(table), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )
)
texts = [" ".join(WORDS[:40]), " ".join(WORDS[40:46]), " ".join(WORDS[46:])]
expected = sum(len(text.split()) + 1 for text in texts)  # with an <end> each


def tokens(**options):
    arguments = trl.SFTConfig(
        output_dir=sys.argv[1], packing=True, max_length=10, use_cpu=True, bf16=False,
        report_to="none", **options,
    )
    data = datasets.Dataset.from_dict({"text": texts})
    trainer = trl.SFTTrainer(
        model=model, args=arguments, train_dataset=data, processing_class=tokenizer
    )
    return [token for row in trainer.train_dataset for token in row["input_ids"]]


default = trl.SFTConfig(output_dir=sys.argv[1], use_cpu=True, bf16=False)
print("defaults:", default.packing_strategy, default.max_length)
assert (default.packing_strategy, default.max_length) == ("bfd", 1024)
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
for name in ("", "transformers", "trl"):
    logging.getLogger(name).addHandler(handler)
logging.captureWarnings(True)
warnings.simplefilter("always")
found = tokens()
about = [message for message in messages if re.search("(?i)drop|cut|longer|trunc", message)]
print(f"packing=True: {len(found)} of {expected} tokens, messages about it: {about} of {len(messages)}")
assert len(found) == 10 + 7 + 5 and table["w39"] not in found and not about
for strategy in ("bfd_split", "wrapped"):
    kept = tokens(packing_strategy=strategy)
    print(f"{strategy}: {len(kept)} of {expected} tokens")
    assert len(kept) == expected
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder/out"

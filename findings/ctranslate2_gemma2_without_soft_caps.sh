#!/usr/bin/env bash
# Guess: CTranslate2's converter from transformers refuses what its Gemma 2 does not compute.
#
# Truth: CTranslate2 4.8.5 converts Gemma 2 without `attn_logit_softcapping`, `final_logit_softcapping`
#   and `query_pre_attn_scalar`: logits have no caps, and scores are divided by the square root of the
#   width of a head. Without caps and with this scalar, the logits are those of transformers.
#
# What a trainer must do: compare logits after a conversion, and not serve Gemma 2 with this library.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 ctranslate2==4.8.5
cat > "$folder/try.py" <<'PYTHON'
import sys

import ctranslate2
import numpy
import tokenizers
import torch
import transformers
from ctranslate2.converters import TransformersConverter

print("ctranslate2", ctranslate2.__version__, "transformers", transformers.__version__)
WORDS = {f"w{index}": index for index in range(64)}
IDS = torch.randint(64, (1, 20), generator=torch.Generator().manual_seed(0))


def difference(name, **fields):
    folder = f"{sys.argv[1]}/{name}"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = transformers.Gemma2Config(**sizes, **ids, **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="w2"))
    named = {"unk_token": "w2", "bos_token": "w0", "eos_token": "w1", "pad_token": "w1"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder)
    TransformersConverter(folder).convert(f"{folder}/converted")
    generator = ctranslate2.Generator(f"{folder}/converted", device="cpu", compute_type="float32")
    logits = numpy.array(generator.forward_batch([[f"w{index}" for index in IDS[0].tolist()]]))
    with torch.no_grad():
        expected = model.eval()(IDS).logits
    return ((torch.tensor(logits) - expected).abs().max() / expected.std()).item()


NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
plain = difference("plain", query_pre_attn_scalar=16, **NO_CAPS)
capped = difference(
    "capped", query_pre_attn_scalar=16, attn_logit_softcapping=1.0, final_logit_softcapping=1.0
)
scaled = difference("scaled", query_pre_attn_scalar=64, **NO_CAPS)
print(f"differences: {plain:.1e} without caps, {capped:.1e} with caps, {scaled:.1e} with a scalar")
assert plain < 1e-4 < 0.1 < min(capped, scaled)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder"

#!/usr/bin/env bash
# Guess: a class of transformers that returns logits for a text also returns the loss of its labels.
#
# Truth: `IdeficsForVisionText2Text` of transformers 5.23 has logits for vocab_size +
#   additional_vocab_size tokens, and its loss reshapes them to vocab_size. With additional tokens,
#   such as the two of idefics-9b, it raises an error about the size of the input. If the number of
#   tokens makes the sizes divisible, the error is about the number of labels.
#
# What a trainer must do: compute the loss of the class's logits itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import torch.nn.functional as F
import transformers
from transformers import IdeficsConfig, IdeficsForVisionText2Text

transformers.logging.set_verbosity_error()
print("torch", torch.__version__, "transformers", transformers.__version__)


def result(n_additional, n_tokens):
    """Return the class's own loss, or its error, and the loss of its logits."""
    config = IdeficsConfig(
        vocab_size=64,
        additional_vocab_size=n_additional,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_resampler=False,
        vision_config={"embed_dim": 32, "image_size": 32, "patch_size": 8}
        | {"intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
    )
    torch.manual_seed(0)
    model = IdeficsForVisionText2Text(config).eval()
    ids = torch.arange(n_tokens)[None] % 60 + 3
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 1, 3, 32, 32)}
    inputs["image_attention_mask"] = torch.ones(1, n_tokens, 1, dtype=torch.long)
    with torch.no_grad():
        logits = model(**inputs).logits
        assert logits.shape[-1] == 64 + n_additional
        expected = float(F.cross_entropy(logits[0, :-1], ids[0, 1:]))
        try:
            return float(model(**inputs, labels=ids).loss), expected
        except (RuntimeError, ValueError) as error:
            return str(error), expected


found = {(n, length): result(n, length) for n, length in ((0, 20), (2, 20), (2, 32))}
for (n_additional, n_tokens), (loss, expected) in found.items():
    print(f"{n_additional} additional, {n_tokens} tokens: {loss}; of the logits: {expected:.4f}")
loss, expected = found[0, 20]
assert abs(loss - expected) < 1e-5
assert found[2, 20][0] == "shape '[-1, 64]' is invalid for input of size 1320"
assert "match" in found[2, 32][0] and "batch_size" in found[2, 32][0]
print("as described")
PYTHON

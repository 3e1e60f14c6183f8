#!/usr/bin/env bash
# Guess: quantizing weights to float8 keeps zeros: a row of zeros stays a row of zeros, as with int8.
#
# Truth: torchao 0.18's Float8WeightOnlyConfig gives a row of zeros the scale 0, and 0 / 0 is NaN in
#   the stored values. Such rows are common: the padding of a vocabulary, or a layer that starts at
#   zero. One padding row in a head makes the largest logit of every token, and each softmax over the
#   vocabulary, NaN. Int8WeightOnlyConfig and IntxWeightOnlyConfig keep the zeros.
#
# What a trainer must do: check quantized weights for NaN before they are saved, and take a scale of
#   1 for rows of zeros, or cut a padded vocabulary first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 torchao==0.18.0 numpy==2.3.5
"$folder/venv/bin/python" - 2> "$folder/errors" <<'PYTHON' || { cat "$folder/errors"; exit 1; }
import importlib.metadata

import torch
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)

print("torchao", importlib.metadata.version("torchao"), "torch", torch.__version__)


def head(kind, rows_of_zeros):
    """Return the logits (3, 16) of a quantized head without bias, and its dequantized weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False))
    with torch.no_grad():
        model[0].weight[16 - rows_of_zeros :] = 0
        expected = model[0].weight.clone()
        quantize_(model, kind())
        return model(torch.randn(3, 32)), model[0].weight.dequantize(), expected


for kind in (Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig):
    for rows in (0, 1):
        logits, weight, expected = head(kind, rows)
        n_nan = int(weight.isnan().any(dim=1).sum())
        probabilities = logits.softmax(-1)
        print(
            f"{kind.__name__}, {rows} rows of zeros: {n_nan} rows of NaN, "
            f"{probabilities.isnan().float().mean():.0%} of the probabilities are NaN"
        )
        is_lost = kind is Float8WeightOnlyConfig and rows == 1
        assert n_nan == int(is_lost) and probabilities.isnan().all() == is_lost
        torch.testing.assert_close(weight[:15], expected[:15], rtol=0.07, atol=0.01)
print("as described")
PYTHON

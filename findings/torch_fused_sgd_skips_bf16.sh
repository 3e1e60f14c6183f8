#!/usr/bin/env bash
# Guess: SGD(fused=True) makes the same step as without `fused`, up to rounding, for weights of any
#   type that it takes.
#
# Truth: on the CPU, PyTorch 2.13's fused SGD computes the step of bfloat16 and float16 weights in
#   vectors, and does not store it: weights of 16 or more values in a row keep their values, with or
#   without momentum. Only the last values of a tensor, which fill no vector, are updated. No error
#   or warning is given. float32 weights, Adam, AdamW and Adagrad are right.
#
# What a trainer must do: use foreach or for-loop SGD on the CPU, and test that a step changes all of
#   the weights, not only that the loss falls: norms, biases and heads of odd sizes still train.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import torch

print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())


def moved(dtype, size, kind=torch.optim.SGD, **options):
    """Return the share of the weights that a step with gradients of 1 changes."""
    weight = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
    weight.grad = torch.ones(size, dtype=dtype)
    kind([weight], lr=0.5, **options).step()
    return (weight != 0).float().mean().item()


for dtype in (torch.bfloat16, torch.float16):
    for momentum in (0, 0.9):
        options = {"momentum": momentum}
        shares = {size: moved(dtype, size, fused=True, **options) for size in (8, 48, 1000, 4096)}
        print(f"{dtype}, momentum {momentum}: size and share of changed weights", shares)
        assert shares[8] == 1 and shares[48] == shares[4096] == 0 and 0 < shares[1000] < 0.02
        assert moved(dtype, 4096, foreach=True, **options) == 1
        assert moved(dtype, 4096, foreach=False, **options) == 1
assert moved(torch.float32, 4096, fused=True) == 1
for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
    assert moved(torch.bfloat16, 4096, kind, fused=True) == 1
print("as described")
PYTHON

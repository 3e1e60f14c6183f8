#!/usr/bin/env bash
# Guess: PyTorch sums in float32 and rounds once when it adds bfloat16 gradients of one place, as it does in
#   `sum`, in the gradient of a bias, and for `index_select` and `gather`.
#
# Truth: in PyTorch 2.13 on a CPU, the gradients of `F.embedding`, of `table[tokens]`, of `F.embedding_bag`
#   and of LayerNorm's weight and bias are added in bfloat16, where 256 + 1 is 256. 1,000 gradients of 1 give
#   256 for the first three, and 512 for LayerNorm's bias. With gradients of mean 0 and variance 1, the row of
#   a token that occurs 4,096 times in a batch is off by about 7 %, with a mean of 1 by more than half;
#   `index_select` stays at 0.2 %. `torch.compile` sums those of `F.embedding` and LayerNorm in float32.
#
# What a trainer must do: on CPUs, sum these gradients in float32, since frequent tokens learn wrongly
#   otherwise, and compiled and other runs differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/try.py" <<'PYTHON'
import torch
import torch.nn.functional as F

N = 1000
TOKENS = torch.ones(N, dtype=torch.long)


def of_table(read, gradient, dtype=torch.bfloat16):
    table = torch.zeros(4, gradient.shape[-1], dtype=dtype, requires_grad=True)
    read(table, torch.ones(len(gradient), dtype=torch.long)).backward(gradient.to(dtype))
    return table.grad[1]


def bias_of_layer_norm():
    bias = torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(8, dtype=torch.bfloat16)
    F.layer_norm(torch.ones(N, 8, dtype=torch.bfloat16), (8,), weight, bias).sum().backward()
    return bias.grad


READS = {
    "embedding": lambda table, tokens: F.embedding(tokens, table),
    "table[tokens]": lambda table, tokens: table[tokens],
    "embedding_bag": lambda table, tokens: F.embedding_bag(tokens[:, None], table, mode="sum"),
    "index_select": lambda table, tokens: table.index_select(0, tokens),
}
print("torch", torch.__version__)
ones = torch.ones(N, 8)
for name, read in READS.items():
    found = of_table(read, ones)[0].item()
    print(f"{name}: {found:.0f} of {N}")
    assert found == (N if name == "index_select" else 256)
found = bias_of_layer_norm()[0].item()
print(f"bias of layer_norm: {found:.0f} of {N}")
assert found < N
print(f"sum: {ones.bfloat16().sum(0)[0].item():.0f} of {N}")
assert ones.bfloat16().sum(0)[0] == N
torch.manual_seed(0)
for mean, least in ((0, 0.03), (1, 0.5)):
    gradient = (torch.randn(4096, 64) + mean).bfloat16()
    exact = gradient.double().sum(0)
    errors = {
        name: ((of_table(read, gradient).double() - exact).norm() / exact.norm()).item()
        for name, read in READS.items()
    }
    print(f"4,096 gradients of mean {mean}: " + ", ".join(f"{n} {e:.3f}" for n, e in errors.items()))
    assert errors["embedding"] > least and errors["index_select"] < 0.005
print("as described")
PYTHON
cd "$folder" && venv/bin/python try.py

#!/usr/bin/env bash
# Guess: PyTorch sums in float32 and rounds once when it adds bfloat16 gradients of one place, as it does in
#   `sum`, in the gradient of a bias, and for `index_select` and `gather`.
#
# Truth: in PyTorch 2.13 on a CPU, the gradients of `F.embedding`, of `table[tokens]`, of `F.embedding_bag`
#   and of LayerNorm's weight and bias are added in bfloat16, where 256 + 1 is 256. 1,000 gradients of 1 give
#   256; LayerNorm's give 512 with two threads, which add a half each. With gradients of mean 0 and variance 1,
#   the row of a token that occurs 4,096 times in a batch is off by about 7 %, with a mean of 1 by more than
#   half; `index_select` stays at 0.2 %. `torch.compile` sums those of `F.embedding` and LayerNorm in float32.
#
# What a trainer must do: on CPUs, sum these gradients in float32, since frequent tokens learn wrongly
#   otherwise, and compiled and other runs differ. The script needs a C++ compiler, for `torch.compile`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/try.py" <<'PYTHON'
import torch
import torch.nn.functional as F

N = 1000


def of_table(read, gradient):
    table = torch.zeros(4, gradient.shape[-1], dtype=torch.bfloat16, requires_grad=True)
    read(table, torch.ones(len(gradient), dtype=torch.long)).backward(gradient.bfloat16())
    return table.grad[1]


def layer_norm(x, weight, bias):
    return F.layer_norm(x, (8,), weight, bias)


def of_layer_norm(norm):
    """Return the gradients of weight and bias, sums of ones."""
    weight = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
    x = torch.tensor([1.0, -1.0] * 4, dtype=torch.bfloat16).expand(N, 8)
    norm(x, weight, bias).backward(torch.ones(N, 8, dtype=torch.bfloat16))
    return weight.grad[0].item(), bias.grad[0].item()


READS = {
    "embedding": lambda table, tokens: F.embedding(tokens, table),
    "table[tokens]": lambda table, tokens: table[tokens],
    "embedding_bag": lambda table, tokens: F.embedding_bag(tokens[:, None], table, mode="sum"),
    "index_select": lambda table, tokens: table.index_select(0, tokens),
    "gather": lambda table, tokens: table.gather(0, tokens[:, None].expand(-1, table.shape[1])),
    "compiled embedding": torch.compile(lambda table, tokens: F.embedding(tokens, table)),
}
IN_16_BITS = ("embedding", "table[tokens]", "embedding_bag")
print("torch", torch.__version__)
ones = torch.ones(N, 8)
for name, read in READS.items():
    found = of_table(read, ones)[0].item()
    print(f"{name}: {found:.0f} of {N}")
    assert found == (256 if name in IN_16_BITS else N)
n_threads = torch.get_num_threads()
for name, norm, threads, expected in (
    ("layer_norm", layer_norm, 1, 256),
    ("layer_norm", layer_norm, 2, 512),
    ("compiled layer_norm", torch.compile(layer_norm), 1, N),
):
    torch.set_num_threads(threads)
    found = of_layer_norm(norm)
    print(f"weight and bias of {name}, {threads} threads: {found} of {N}")
    assert found == (expected, expected)
torch.set_num_threads(n_threads)
bias = torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
(torch.zeros(N, 8, dtype=torch.bfloat16) + bias).backward(ones.bfloat16())
for name, found in (("sum", ones.bfloat16().sum(0)[0].item()), ("bias", bias.grad[0].item())):
    print(f"{name}: {found:.0f} of {N}")
    assert found == N
torch.manual_seed(0)
for mean, least, most in ((0, 0.05, 0.1), (1, 0.5, 1)):
    gradient = (torch.randn(4096, 64) + mean).bfloat16()
    exact = gradient.double().sum(0)
    errors = {
        name: ((of_table(read, gradient).double() - exact).norm() / exact.norm()).item()
        for name, read in READS.items()
    }
    print(f"4,096 gradients of mean {mean}: " + ", ".join(f"{n} {e:.3f}" for n, e in errors.items()))
    assert all((least < errors[name] < most) == (name in IN_16_BITS) for name in READS)
    assert errors["index_select"] < 0.003
print("as described")
PYTHON
cd "$folder" && venv/bin/python try.py

#!/usr/bin/env bash
# Guess: `.item()` of a norm, sum or mean of sharded weights is that of the whole weights, as the
#   tensor is a DTensor of shape () that later operations take for the whole value.
#
# Truth: with PyTorch 2.13, `norm()`, `sum()` and `mean()` of a DTensor stay partial, and `.item()`
#   and `float()` return the part of this rank, without communication, error or warning. The logged
#   norm of weights or activations is too small and differs on each rank; the mean is that of a
#   shard. A comparison (`weight.sum() > 20`) sees the whole value, and so does the norm that
#   torch.nn.utils.get_total_norm and clip_grad_norm_ return.
#
# What a trainer must do: call `full_tensor()` on all ranks before `.item()`, and never branch on the
#   latter: ranks take different branches.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cat > "$folder/try.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

RANKS = 2
WHOLE = torch.arange(8.0).reshape(4, 2)
REDUCTIONS = {"norm": torch.norm, "sum": torch.sum, "mean": torch.mean, "max": torch.max}


def main(rank, path):
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=RANKS)
    weight = distribute_tensor(WHOLE, init_device_mesh("cpu", (RANKS,)), [Shard(0)])
    half = WHOLE.chunk(RANKS)[rank]
    if rank == 0:
        print("torch", torch.__version__)
    for name, reduce in REDUCTIONS.items():
        reduced = reduce(weight)
        found, right = reduced.item(), reduced.full_tensor().item()
        print(f"rank {rank}, {name}: item() {found:.4g}, of the whole {right:.4g}", flush=True)
        assert right == reduce(WHOLE).item()
        assert found == float(reduced) == reduce(half).item()
    is_large = weight.sum() > 20
    assert is_large.item() and not weight.sum().item() > 22
    total = torch.nn.utils.get_total_norm([weight]).item()
    torch.testing.assert_close(total, torch.norm(WHOLE).item())


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (sys.argv[1],), nprocs=RANKS)
    print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder/ranks" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }

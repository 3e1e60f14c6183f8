#!/usr/bin/env bash
# Guess: `all_reduce` with MAX or MIN returns NaN if a rank holds one, as torch.max does. So the largest
#   gradient, the largest logit or an amax over ranks shows that one rank diverged, and
#   `clip_grad_norm_(..., norm_type=inf, error_if_nonfinite=True)` raises.
#
# Truth: with PyTorch 2.13 and gloo, a NaN on the first rank reaches all ranks, and a NaN on another
#   rank is dropped: all ranks get the largest of the other numbers. Of a longer tensor, each part is
#   reduced in another order, so the NaN stays in some elements. The same holds for MAX and MIN,
#   float32 and bfloat16, and for the maximum and the infinity norm of a DTensor: the gradients hold a
#   NaN, their norm is finite, nothing is raised, and the step writes the NaN into the weights. With
#   norm_type=2, which sums, the norm is NaN and the error is raised.
#
# What a trainer must do: reduce a flag beside the maximum (the number of values that are not finite,
#   with SUM), or decide by a sum.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/try.py" <<'PYTHON'
import math
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.utils import clip_grad_norm_

RANKS = 2


def clipped(rank_with_nan, mesh, norm_type):
    gradient = torch.ones(RANKS)
    gradient[rank_with_nan] = math.nan
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(RANKS), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
    try:
        norm = clip_grad_norm_([weight], 1.0, norm_type=norm_type, error_if_nonfinite=True)
    except RuntimeError:
        return "raised"
    return norm.full_tensor().item()


def main(rank, path):
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for name in ("MAX", "MIN"):
        for dtype in (torch.float32, torch.bfloat16):
            for rank_with_nan in range(RANKS):
                value = torch.tensor([math.nan if rank == rank_with_nan else 1.0], dtype=dtype)
                dist.all_reduce(value, getattr(dist.ReduceOp, name))
                assert math.isnan(value) == (rank_with_nan == 0)
                if rank == 0:
                    print(f"{name} {dtype}, NaN on rank {rank_with_nan}: {value.item()}")
    assert torch.tensor([1.0, math.nan]).max().isnan()
    found = {(at, p): clipped(at, mesh, p) for at in range(RANKS) for p in (math.inf, 2.0)}
    if rank == 0:
        for (rank_with_nan, norm_type), norm in found.items():
            print(f"clip_grad_norm_, norm {norm_type}, NaN on rank {rank_with_nan}: {norm}")
    assert found == {(0, math.inf): "raised", (0, 2.0): "raised", (1, math.inf): 1.0, (1, 2.0): "raised"}
    long = torch.full((1000,), math.nan if rank == 1 else 1.0)
    dist.all_reduce(long, dist.ReduceOp.MAX)
    n_nan = int(long.isnan().sum())
    assert 0 < n_nan < 1000
    if rank == 0:
        print(f"MAX of 1,000 elements, all NaN on rank 1: {n_nan} are NaN")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    torch.multiprocessing.spawn(main, (sys.argv[1],), nprocs=RANKS)
    print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder/ranks" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }

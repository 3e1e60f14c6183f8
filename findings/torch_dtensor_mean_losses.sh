#!/usr/bin/env bash
# Guess: F.mse_loss of predictions that are sharded over ranks as a DTensor is that of the whole
#   tensors, value and gradients, as it is for (a - b).square().mean().
#
# Truth: with PyTorch 2.13, the gradients of mse_loss, huber_loss, smooth_l1_loss,
#   binary_cross_entropy and soft_margin_loss with reduction="mean" are too large by the number of
#   ranks. With uneven shards, the value is wrong as well: the mean over ranks of their means. Adam
#   and gradient clipping hide the factor, unless such a loss is one of several terms. l1_loss and
#   kl_div are right, and so is reduction="sum".
#
# What a trainer must do: sum such losses (reduction="sum") and divide by the number of elements on
#   all ranks, or compute them on local tensors; compare gradients with a single process.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cat > "$folder/try.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

RANKS = 2
WRONG = (F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss)


def composed(predictions, targets, reduction="mean"):
    squares = (predictions - targets).square()
    return squares.mean() if reduction == "mean" else squares.sum()


def value_and_gradients(loss, predictions, targets, reduction):
    predictions = predictions.detach().requires_grad_()
    value = loss(predictions, targets, reduction=reduction)
    value.backward()
    return value.detach(), predictions.grad


def factors(loss, rows, mesh, reduction="mean"):
    """Return value and gradients of sharded tensors over those of whole tensors: two factors."""
    chance = torch.Generator().manual_seed(0)
    whole = [torch.rand(rows, 8, generator=chance).double() for _ in range(2)]
    value, gradients = value_and_gradients(loss, *whole, reduction)
    sharded = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in whole]
    sharded_value, sharded_gradients = value_and_gradients(loss, *sharded, reduction)
    norms = sharded_gradients.full_tensor().norm() / gradients.norm()
    return round((sharded_value.full_tensor() / value).item(), 3), round(norms.item(), 3)


def main(rank, path):
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    tell = print if rank == 0 else lambda *_: None
    tell("torch", torch.__version__, f"on {RANKS} ranks; factors of value and gradients")
    for loss in (*WRONG, F.l1_loss, F.kl_div, composed):
        even, uneven = factors(loss, 4, mesh), factors(loss, 5, mesh)
        tell(f"{loss.__name__}: {even} for 4 rows, {uneven} for 5 rows")
        if loss in WRONG:
            assert even == (1, RANKS) and uneven[0] != 1 and uneven[1] > 1.5
        else:
            assert even == uneven == (1, 1)
        assert factors(loss, 5, mesh, "sum") == (1, 1)
    tell("as described")


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (sys.argv[1],), nprocs=RANKS)
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder/ranks" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }

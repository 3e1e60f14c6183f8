"""Muon on several processes: the updates of torch.optim.Muon in one process, each matrix
orthogonalized once."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.processes import run_processes

SHAPES = [(24, 16), (16, 24), (24, 16), (12, 16), (16, 16), (40, 8), (24, 16)]
PRODUCTS = 15
"""Matrix products of five iterations."""
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}


class Products(TorchDispatchMode):
    """Count matrix products on plain tensors, and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def matrices(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def compare_layout(sizes: dict[str, int], placements: list[list]) -> None:
    """Compare two steps, with each matrix laid out by the placements in turn."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    from torchtitan.components.optim.muon import Muon

    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    layouts = [placements[index % len(placements)] for index in range(len(SHAPES))]

    def sharded(step: int) -> list:
        return [
            distribute_tensor(x, mesh, layout)
            for x, layout in zip(matrices(step), layouts, strict=True)
        ]

    whole, parts = map(nn.ParameterList, (matrices(0), sharded(0)))
    reference, optimizer = (
        torch.optim.Muon(whole, **SETTINGS),
        Muon([{"params": parts}], **SETTINGS),
    )
    for step in (1, 2):
        for parameter, gradient in zip(
            [*whole, *parts], [*matrices(step), *sharded(step)], strict=True
        ):
            parameter.grad = gradient
        reference.step()
        with Products() as products:
            optimizer.step()
        own = len(range(dist.get_rank(), len(SHAPES), dist.get_world_size()))
        assert products.calls["mm"] + products.calls["addmm"] == PRODUCTS * own
        assert products.calls["broadcast_"] <= len(SHAPES) * len(sizes)
    for expected, parameter in zip(whole, parts, strict=True):
        moment = optimizer.state[parameter]["momentum_buffer"].full_tensor()
        assert torch.equal(moment, reference.state[expected]["momentum_buffer"])
        # Each matrix is computed whole, from the same values in the same order.
        assert torch.equal(parameter.full_tensor(), expected)


def compare_layouts(folder: Path) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    tensor_parallel = [
        [_StridedShard(0, split_factor=2), Shard(0)],
        [Shard(0), Shard(1)],
        [Shard(0), Replicate()],
    ]
    compare_layout({"fsdp": 4}, [[Shard(0)]])  # 16 rows, and 12
    compare_layout({"dp_replicate": 4}, [[Replicate()]])
    compare_layout({"dp_replicate": 2, "fsdp": 2}, [[Replicate(), Shard(0)]])
    compare_layout({"fsdp": 2, "tp": 2}, tensor_parallel)
    (folder / f"rank {dist.get_rank()} has compared").touch()


@pytest.mark.slow
def test_four_processes_equal_torch_in_one(tmp_path):
    run_processes(compare_layouts, 4, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4

"""Tests of DTensors and FSDP's units."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from torchtitan.tools.sharded import is_dtensor, is_fsdp_module
from torchtitan.tools.torch_private import allocate


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_tensors_and_modules_are_recognized(one_rank) -> None:
    plain, unit = torch.ones(2), nn.Linear(2, 2)
    sharded = distribute_tensor(plain, one_rank, [Replicate()])
    assert is_dtensor(sharded) and is_dtensor(nn.Parameter(sharded))
    assert not is_dtensor(plain) and not is_dtensor(None) and not is_fsdp_module(unit)
    fully_shard(unit, mesh=one_rank)
    assert is_fsdp_module(unit) and is_dtensor(unit.weight)


def test_compiled_code_may_ask() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def asked(x: torch.Tensor) -> torch.Tensor:
        return x + 2 if is_dtensor(x) else x + 1

    assert asked(torch.zeros(1)).item() == 1


def test_allocated_tensors_are_laid_out_as_by_to_empty() -> None:
    """Also one whose dimensions are in another order in memory."""

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            module = nn.Linear(3, 2)
            module.register_buffer("turned", torch.empty(4, 5).T)
            module.register_buffer("step", torch.empty((), dtype=torch.int32))
        return module

    ours, theirs = on_meta(), on_meta().to_empty(device="cpu")
    allocate(ours, "cpu")
    expected = {name: (x.device, x.dtype, x.stride()) for name, x in theirs.state_dict().items()}
    found = {name: (x.device, x.dtype, x.stride()) for name, x in ours.state_dict().items()}
    assert found == expected
    assert expected["turned"][2] == (1, 5)
    assert isinstance(ours.weight, nn.Parameter) and ours.weight.requires_grad

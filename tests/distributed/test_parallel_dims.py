"""Degrees of parallelism: defaults, validation, and the mesh."""

import contextlib
from collections.abc import Iterator
from math import prod

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models import qwen3_moe
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols import BaseModel
from torchtitan.tools.errors import UserError

SIZES = [
    {"dp_shard": 2},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 2, "cp": 2},
    {"cp": 2, "tp": 2},
    {"pp": 2, "tp": 3},
    {"pp": 2, "dp_replicate": 3, "dp_shard": 2, "cp": 2, "tp": 2},
]


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Act as `rank` of a fake process group that does not communicate."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_dims(**sizes: int) -> ParallelDims:
    ranks = {name: size for name, size in sizes.items() if name not in ("ep", "etp")}
    return ParallelDims(world_size=prod(ranks.values()), **sizes)


def model_config() -> BaseModel.Config:
    """Return a configuration with 8 heads, 4 key/value heads, and a feed-forward width of 768."""
    return model_registry("debugmodel").model


def test_the_shard_degree_defaults_to_the_remaining_ranks():
    config = ParallelismConfig(tensor_parallel_degree=2, data_parallel_replicate_degree=3)
    dims = ParallelDims.from_config(config, world_size=24)
    assert dims == ParallelDims(world_size=24, dp_replicate=3, dp_shard=4, tp=2)
    assert ParallelDims.from_config(ParallelismConfig(), world_size=1) == ParallelDims(world_size=1)


@pytest.mark.parametrize(
    ("degrees", "world_size", "message"),
    [
        (
            {"data_parallel_shard_degree": 3},
            4,
            "--parallelism.data_parallel_shard_degree 3 is not the number of processes, 4",
        ),
        (
            {"tensor_parallel_degree": 3},
            4,
            "--parallelism.tensor_parallel_degree 3 does not divide the number of processes, 4",
        ),
        (
            {"tensor_parallel_degree": 4},
            2,
            "--parallelism.tensor_parallel_degree 4 does not divide the number of processes, 2",
        ),
        (
            {"tensor_parallel_degree": 2, "context_parallel_degree": 3},
            4,
            "--parallelism.context_parallel_degree 3 x --parallelism.tensor_parallel_degree 2 = 6 "
            "do not divide the number of processes, 4",
        ),
        (
            {
                "context_parallel_degree": 2,
                "pipeline_parallel_degree": 2,
                "data_parallel_shard_degree": 2,
            },
            4,
            "--parallelism.context_parallel_degree 2 x --parallelism.pipeline_parallel_degree 2 = "
            "8 is not the number of processes, 4",
        ),
        (
            {"tensor_parallel_degree": 0},
            1,
            "--parallelism.tensor_parallel_degree is 0, but must be at least 1",
        ),
        ({"context_parallel_degree": -1}, 1, "--parallelism.context_parallel_degree is -1"),
        ({"pipeline_parallel_degree": 0}, 1, "--parallelism.pipeline_parallel_degree is 0"),
        (
            {"data_parallel_replicate_degree": 0},
            1,
            "--parallelism.data_parallel_replicate_degree is 0",
        ),
        ({"data_parallel_shard_degree": 0}, 1, "--parallelism.data_parallel_shard_degree is 0"),
        (
            {"expert_parallel_degree": 0},
            1,
            "--parallelism.expert_parallel_degree is 0, but must be at least 1",
        ),
        (
            {"expert_parallel_degree": 4, "pipeline_parallel_degree": 2},
            4,
            "--parallelism.expert_parallel_degree 4 does not divide "
            "--parallelism.data_parallel_shard_degree 2",
        ),
        (
            {"expert_parallel_degree": 3, "tensor_parallel_degree": 2},
            4,
            "--parallelism.expert_parallel_degree 3 does not divide "
            "--parallelism.data_parallel_shard_degree 2 x --parallelism.tensor_parallel_degree 2 = "
            "4",
        ),
        (
            {
                "expert_parallel_degree": 4,
                "tensor_parallel_degree": 2,
                "expert_tensor_parallel_degree": 2,
            },
            4,
            "--parallelism.expert_parallel_degree 4 does not divide "
            "--parallelism.data_parallel_shard_degree 2",
        ),
        (
            {"expert_tensor_parallel_degree": 4, "tensor_parallel_degree": 2},
            4,
            "--parallelism.expert_tensor_parallel_degree is 4, but must be 1 or "
            "--parallelism.tensor_parallel_degree 2",
        ),
    ],
)
def test_degrees_that_do_not_fit_the_processes_are_rejected(degrees, world_size, message):
    with pytest.raises(UserError) as error:
        ParallelDims.from_config(ParallelismConfig(**degrees), world_size)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "changed", "seq_len", "message"),
    [
        (
            {"tp": 3},
            {},
            48,
            "--parallelism.tensor_parallel_degree 3 does not divide --model.n_heads 8",
        ),
        (
            {"tp": 8},
            {},
            64,
            "--parallelism.tensor_parallel_degree 8 does not divide --model.n_kv_heads 4",
        ),
        (
            {"tp": 4},
            {"ffn_dim": 766},
            64,
            "--parallelism.tensor_parallel_degree 4 does not divide --model.ffn_dim 766",
        ),
        (
            {"tp": 4},
            {},
            62,
            "--parallelism.tensor_parallel_degree 4 does not divide --training.seq_len 62",
        ),
        (
            {"cp": 2},
            {},
            62,
            "--parallelism.context_parallel_degree 2, doubled by the load balancer `headtail`: 4, "
            "does not divide --training.seq_len 62",
        ),
        (
            {"tp": 2, "cp": 2},
            {},
            68,
            "--parallelism.tensor_parallel_degree 2 x --parallelism.context_parallel_degree 2 = 4, "
            "doubled by the load balancer `headtail`: 8, does not divide --training.seq_len 68",
        ),
    ],
)
def test_sizes_that_cannot_be_sharded_are_rejected(sizes, changed, seq_len, message):
    model = model_config()
    for name, value in changed.items():
        setattr(model, name, value)
    with pytest.raises(UserError) as error:
        make_dims(**sizes).check_fits(model, seq_len)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("sizes", "flavor", "message"),
    [
        (
            {"ep": 3},
            "debugmodel",
            "--parallelism.expert_parallel_degree 3 does not divide --model.moe.n_experts 32",
        ),
        (
            {"tp": 5, "etp": 5},
            "debugmodel",
            "--parallelism.expert_tensor_parallel_degree 5 does not divide --model.moe.ffn_dim 96",
        ),
        (
            {"ep": 2},
            None,
            "--parallelism.expert_parallel_degree 2 divides routed experts, and Llama3Model has "
            "none; set 1",
        ),
    ],
)
def test_experts_that_cannot_be_divided_are_rejected(sizes, flavor, message):
    model = qwen3_moe.model_registry(flavor).model if flavor else model_config()
    model.n_heads = model.n_kv_heads = 5 if sizes.get("tp") else model.n_kv_heads
    with pytest.raises(UserError) as error:
        make_dims(**{"dp_shard": 6, **sizes}).check_fits(model, 60)
    assert str(error.value) == message


@pytest.mark.parametrize("dimension", ["tp", "cp", "pp"])
def test_unsupported_parallelisms_are_refused_with_the_reason(monkeypatch, dimension):
    field = {"tp": "tensor", "cp": "context", "pp": "pipeline"}[dimension] + "_parallel_degree"
    model = model_config()
    monkeypatch.setattr(
        type(model), "unsupported_parallelisms", lambda config: {field: "its state is not split"}
    )
    with pytest.raises(UserError) as error:
        make_dims(**{dimension: 2}).check_fits(model, 64)
    assert (
        str(error.value)
        == f"--parallelism.{field} 2 must be 1 for Llama3Model, because its state is not split"
    )
    others = {name: 2 for name in ("tp", "cp", "pp") if name != dimension}
    make_dims(**others, dp_shard=2).check_fits(model, 64)


def test_sizes_that_can_be_sharded_are_accepted():
    make_dims(tp=4).check_fits(model_config(), 64)
    make_dims(cp=3).check_fits(model_config(), 66)  # heads are not split
    contiguous = ParallelDims(world_size=2, cp=2, cp_load_balancer="none")
    contiguous.check_fits(model_config(), 62)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_coordinates_match_the_mesh(sizes):
    """Coordinates are computed without a mesh, since the data loader and the loss also need them in
    one process."""
    dims = make_dims(**sizes)
    ranks_by_share: dict[int, list[int]] = {}
    leaders = []
    for rank in range(dims.world_size):
        with fake_rank(rank, dims.world_size):
            mesh = dims.build_mesh("cpu")
            for name in ("pp", "dp_replicate", "tp"):
                assert dims.coordinate(name) == mesh.get_local_rank(name)
            assert dims.coordinate("dp_shard") * dims.cp + dims.coordinate(
                "cp"
            ) == mesh.get_local_rank("fsdp")
            assert dims.context_mesh(mesh).get_local_rank() == dims.coordinate("cp")
            assert dims.context_mesh(mesh).size() == dims.cp
            ranks_by_share.setdefault(dims.dp_rank, []).append(rank)
            if dims.is_batch_leader:
                leaders.append(dims.dp_rank)
            assert dims.is_tensor_leader == (mesh.get_local_rank("tp") == 0)
    assert sorted(ranks_by_share) == sorted(leaders) == list(range(dims.dp_degree))
    assert {len(ranks) for ranks in ranks_by_share.values()} == {dims.pp * dims.cp * dims.tp}
    assert dims.gradient_degree * dims.pp * dims.tp == dims.world_size


def test_tensor_parallel_ranks_are_adjacent():
    """They communicate most, and adjacent ranks are on one host."""
    dims = make_dims(pp=2, dp_shard=2, cp=2, tp=2)
    with fake_rank(5, 16):
        mesh = dims.build_mesh("cpu")
        assert mesh["tp"].mesh.tolist() == [4, 5]
        assert dims.context_mesh(mesh).mesh.tolist() == [5, 7]
        assert mesh["fsdp"].mesh.tolist() == [1, 3, 5, 7]
        assert mesh["pp"].mesh.tolist() == [5, 13]


def test_a_single_process_has_no_mesh():
    dims = ParallelDims(world_size=1)
    assert dims.build_mesh("cpu") is None
    assert dims.dp_rank == 0
    assert dims.is_batch_leader
    assert dims.is_tensor_leader

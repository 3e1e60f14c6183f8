"""The gradient norm over several meshes, plain tensors, and several pipeline stages."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.equivalence.workers import Workers
from torchtitan.distributed.gradients import clip_grad_norm, total_norm

SHAPES = {"plain": (7,), "column": (8, 5), "row": (6, 8), "norm": (5,), "both": (9, 4)}


def whole_gradients(stage: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(stage)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make_parameters(mesh: DeviceMesh, gradients: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    """Build one plain parameter, three on the tensor-parallel mesh, and one on both dimensions.
    Gradients have the placements of a backward pass, which for two parameters differ from the
    placements of the parameter."""
    tp = mesh["tp"]
    shard, whole = [Shard(0)], [Replicate()]
    parameters = {
        "plain": nn.Parameter(torch.zeros(SHAPES["plain"])),
        "column": nn.Parameter(distribute_tensor(torch.zeros(SHAPES["column"]), tp, shard)),
        "row": nn.Parameter(distribute_tensor(torch.zeros(SHAPES["row"]), tp, [Shard(1)])),
        "norm": nn.Parameter(distribute_tensor(torch.zeros(SHAPES["norm"]), tp, whole)),
        "both": nn.Parameter(
            distribute_tensor(torch.zeros(SHAPES["both"]), mesh["fsdp", "tp"], [Shard(0), Shard(1)])
        ),
    }
    parameters["plain"].grad = gradients["plain"].clone()
    # like an embedding
    parameters["column"].grad = distribute_tensor(gradients["column"], tp, whole)
    parameters["row"].grad = distribute_tensor(gradients["row"], tp, [Shard(1)])
    part = gradients["norm"] * (0.25 if tp.get_local_rank() == 0 else 0.75)
    # like a norm with sequence parallelism
    parameters["norm"].grad = DTensor.from_local(part, tp, [Partial()])
    parameters["both"].grad = distribute_tensor(
        gradients["both"], mesh["fsdp", "tp"], [Shard(0), Shard(1)]
    )
    return parameters


def clip_on_mesh(degrees: tuple[int, int, int], max_norm: float, folder: Path) -> None:
    mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("pp", "fsdp", "tp"))
    stage, n_stages = mesh.get_local_rank("pp"), degrees[0]
    gradients = whole_gradients(stage)
    parameters = make_parameters(mesh, gradients)
    pipeline = mesh.get_group("pp") if n_stages > 1 else None
    before = {name: parameter.grad for name, parameter in parameters.items()}
    norm = clip_grad_norm(parameters.values(), max_norm, pipeline)
    everything = [
        gradient for number in range(n_stages) for gradient in whole_gradients(number).values()
    ]
    exact = sum(gradient.double().square().sum() for gradient in everything).sqrt().item()
    assert type(norm) is Tensor and norm.shape == ()
    # Float32 rounding of a few values.
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    # The others have the layout of their weights, so that nothing is exchanged or copied.
    assert {
        name for name, parameter in parameters.items() if parameter.grad is not before[name]
    } == {"column", "norm"}
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            assert parameter.grad.placements == parameter.placements, name
        clipped = (
            parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        )
        torch.testing.assert_close(
            clipped, gradients[name] * min(1.0, max_norm / exact), rtol=1e-5, atol=1e-7
        )
    (folder / str(dist.get_rank())).touch()


def norm_without_gradients(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    gradients = [torch.tensor([3.0, 4.0])] if mesh.get_local_rank("pp") == 0 else []
    assert total_norm(gradients, mesh.get_group("pp")).item() == 5.0
    (folder / str(dist.get_rank())).touch()


@pytest.fixture(scope="module")
def four_processes():
    with Workers(4) as workers:
        yield workers


@pytest.mark.parametrize("max_norm", [1.0, float("inf")])
@pytest.mark.parametrize("degrees", [(1, 2, 2), (2, 1, 2)], ids=["FSDP x TP", "PP x TP"])
def test_norm_over_meshes_and_stages(four_processes, tmp_path, degrees, max_norm):
    four_processes.run(clip_on_mesh, degrees, max_norm, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_stage_without_gradients_gets_the_norm(four_processes, tmp_path):
    four_processes.run(norm_without_gradients, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4

"""What a dry run finds out about one rank."""

from dataclasses import dataclass
from math import prod

from torchtitan.distributed import ParallelDims
from torchtitan.dry_run.fake_trainer import FakeTrainer
from torchtitan.dry_run.memory_tracker import MemoryKind
from torchtitan.dry_run.work_tracker import CommunicationKind, Volume

ON_HOST: tuple[MemoryKind, ...] = ("parameters", "gradients", "optimizer")
"""What `training.enable_cpu_offload` keeps in CPU memory."""


@dataclass(frozen=True)
class Traffic:
    """What a rank communicates in one step; see `Volume`."""

    kind: CommunicationKind
    axis: str
    """Mesh dimensions that the communicating ranks differ in, joined by `+`."""
    calls: int
    n_bytes: int
    n_bytes_sent: int


@dataclass(frozen=True)
class RankReport:
    """One rank, which stands for all with the same pipeline stages. Memory in bytes, work of one optimizer step."""

    rank: int
    stages: list[int]
    """Numbers of its pipeline stages."""
    parameters: int
    """Elements of its part of the weights."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak: dict[MemoryKind, int]
    """What is in device memory at the moment when that is most."""
    peak_bytes: int
    """Their sum."""
    peak_reserved_bytes: int
    """What PyTorch's CUDA allocator would have reserved by the end of the step, see `CachingAllocator`."""
    communication: list[Traffic]
    model_flops: float
    """By the usual formula, evenly over all ranks: what model FLOP/s utilization counts."""
    executed_flops: int
    """Matrix products and attention that this rank computes, recomputed ones included."""


def report_of(trainer: FakeTrainer) -> RankReport:
    """The report of a trainer that has measured a step."""
    memory, dims = trainer.memory, trainer.parallel_dims
    not_on_device = ON_HOST if trainer.config.training.enable_cpu_offload else ()
    held = memory.use().by_kind
    peak = memory.peak(without=not_on_device)
    plan = trainer.pipeline_plan
    return RankReport(
        rank=trainer.rank,
        stages=plan.stages_of_rank(dims.coordinate("pp")) if plan else [0],
        parameters=trainer.count_own_parameters(),
        parameter_bytes=held["parameters"],
        gradient_bytes=held["gradients"],
        optimizer_bytes=held["optimizer"],
        peak=peak.by_kind,
        peak_bytes=peak.total,
        peak_reserved_bytes=memory.reserved(without=not_on_device),
        communication=_by_axis(trainer, dims),
        model_flops=trainer.flops_per_token * trainer.tokens_per_step / dims.world_size,
        executed_flops=trainer.work.work.flops,
    )


def _by_axis(trainer: FakeTrainer, dims: ParallelDims) -> list[Traffic]:
    volumes: dict[tuple[CommunicationKind, str], Volume] = {}
    for (kind, ranks), volume in trainer.work.work.volumes.items():
        key = (kind, axis_of(ranks, dims))
        volumes[key] = volumes.get(key, Volume()) + volume
    return [
        Traffic(kind, axis, volume.calls, volume.n_bytes, round(volume.n_bytes_sent))
        for (kind, axis), volume in sorted(volumes.items(), key=lambda item: -item[1].n_bytes)
    ]


def axis_of(ranks: tuple[int, ...], dims: ParallelDims) -> str:
    """The mesh dimensions in which these ranks have different places: `dp_shard+cp`."""
    names, sizes = list(dims.sizes), list(dims.sizes.values())
    inner = [prod(sizes[index + 1 :]) for index in range(len(sizes))]
    places = [[rank // step % size for step, size in zip(inner, sizes, strict=True)] for rank in ranks]
    return "+".join(
        name for name, of_ranks in zip(names, zip(*places, strict=True), strict=True) if len(set(of_ranks)) > 1
    )

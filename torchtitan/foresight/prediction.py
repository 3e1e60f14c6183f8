"""Prediction of a run's time and memory from the profile of a layer."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline import PipelinePlan
from torchtitan.dry_run.report import RankReport
from torchtitan.dry_run.work_tracker import CommunicationKind, Kernel, Volume
from torchtitan.foresight.devices import Device, device_named
from torchtitan.foresight.profile import (
    Portion,
    Profile,
    Split,
    model_flops,
    model_of,
    profile,
    role_of,
    scaled_kernels,
)
from torchtitan.foresight.time import Group, Message, Methods, Role, StepTime, step_time, with_bubble
from torchtitan.trainer import Trainer

GIB = 2**30

RESERVED = {False: 1.2, True: 1.12}
"""Reserved by the allocator, relative to allocated memory, in eager mode and compiled: gaps between blocks, with CUDA's
and NCCL's buffers. Fitted to rows 1, 2 and 11 of the published runs."""

_GRADIENT_BYTES = 4
"""Gradients that accumulate in a pipeline are float32, and not sharded before the last micro-batch."""


@dataclass(frozen=True)
class Prediction:
    """Time of a step, and peak memory of the rank that needs most."""

    time: StepTime
    memory_bytes: float
    """As the allocator reserves it."""
    tokens_per_second: float
    """Per device."""
    mfu: float
    """Model FLOP/s utilization, from 0 to 1, relative to the bfloat16 peak."""

    @property
    def seconds(self) -> float:
        return self.time.total

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / GIB


def predict(
    config: Trainer.Config,
    world_size: int,
    device: Device | str = "h100",
    *,
    devices_per_host: int = 8,
    is_async_tp: bool = False,
) -> Prediction:
    """Predict the step of a run.

    Args:
        config: the run's configuration, with its layout.
        world_size: devices of the run.
        device: a device, or its name in `DEVICES`.
        devices_per_host: devices that are connected by fast links.
        is_async_tp: whether products overlap with tensor-parallel communication.

    Raises:
        UserError: for an impossible layout, or a model without repeated layers.
    """
    device = device_named(device, world_size) if isinstance(device, str) else device
    dims = config.check_layout(world_size)
    split = split_of(config, dims)
    return compose(config, dims, device, profile(config, split), devices_per_host, is_async_tp=is_async_tp)


def split_of(config: Trainer.Config, dims: ParallelDims) -> Split:
    """Return how a configuration divides a micro-batch."""
    parallelism, training = config.parallelism, config.training
    sequences = parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size
    mode = config.activation_checkpoint.mode
    return Split(dims.tp, dims.cp, dims.ep, dims.etp, dims.dp_shard * dims.cp > 1, sequences, mode)


def methods_of(config: Trainer.Config, *, is_async_tp: bool = False) -> Methods:
    """Return how a configuration computes."""
    converters = [one for one in config.model_converters if isinstance(one, Float8LinearConverter.Config)]
    float8 = next((one for one in converters if not one.emulate), None)
    is_compiled = config.compile.enable and "model" in config.compile.components
    return Methods(is_compiled, float8 is not None, bool(float8 and float8.fsdp_float8_all_gather), is_async_tp)


def float8_part(config: Trainer.Config, methods: Methods) -> float:
    """Return the part of the products' operations that is in float8: the head is not."""
    if not methods.uses_float8:
        return 0.0
    model = config.model_spec.model
    *_, total = model_of(config)
    head = (model.vocab_size or 0) * getattr(model, "dim", 0)
    embedding = 0 if getattr(model, "tie_embeddings", False) else head
    return max(0.0, 1 - head / (total - embedding))


def compose(
    config: Trainer.Config,
    dims: ParallelDims,
    device: Device,
    measured: Profile,
    devices_per_host: int,
    *,
    batch: float = 1.0,
    is_async_tp: bool = False,
) -> Prediction:
    """Predict a run from the profile of a layer; its micro-batch is `batch` times that of the profile."""
    training, parallelism = config.training, config.parallelism
    n_layers, first, _ = model_of(config)
    methods = methods_of(config, is_async_tp=is_async_tp)
    shards = dims.dp_shard * dims.cp
    global_batch = training.resolve_global_batch_size(dims.dp_degree)
    accumulation = global_batch // (training.local_batch_size * dims.dp_degree)
    pipeline = None
    if dims.pp > 1:
        pipeline = PipelinePlan.from_config(parallelism, config.model_spec.model, training.local_batch_size)
    passes = accumulation * (pipeline.n_microbatches if pipeline else 1)
    times, memory = [], []
    for rank in range(dims.pp):
        layers, rest = _held_by(rank, pipeline, n_layers)
        parts = [(measured.layer, float(layers)), (measured.rest, float(rest))]
        kernels = [pair for part, n in parts for pair in scaled_kernels(part, n * passes, batch)]
        if pipeline:  # weights are gathered, and gradients reduced, once per local batch
            n_local = accumulation / passes
            kernels = [(k, calls * (n_local if k.kind == "sharding" else 1)) for k, calls in kernels]
        volumes: dict[tuple[Role, CommunicationKind], Volume] = {}
        for part, n in parts:
            _add_volumes(volumes, part, n, passes, accumulation if pipeline else passes, batch)
        kernels += _update(parts, shards)
        if dims.dp_replicate > 1:
            n_bytes = sum(part.parameters * n for part, n in parts) * _GRADIENT_BYTES / shards
            volumes["replicas", "all-reduce"] = Volume(ceil(layers) * passes, round(n_bytes * accumulation))
        messages = list(_messages(volumes, dims, devices_per_host))
        time = step_time(device, kernels, messages, methods, float8_part=float8_part(config, methods))
        times.append(time)
        memory.append(_memory(measured, dims, pipeline, rank, layers, rest, batch, accumulation))
    slowest = max(times, key=lambda time: time.total)
    if pipeline:
        stages = len(pipeline.stages) // dims.pp
        slowest = with_bubble(slowest, pipeline.schedule, dims.pp, pipeline.n_microbatches, stages)  # type: ignore[arg-type]
    reserved = max(memory) * RESERVED[methods.is_compiled]
    return _prediction(config, dims, device, slowest, reserved, global_batch)


def time_of_reports(
    config: Trainer.Config, reports: list[RankReport], world_size: int, device: Device, devices_per_host: int
) -> Prediction:
    """Predict the step of a dry run from all of its operations."""
    dims = config.check_layout(world_size)
    methods = dataclasses.replace(methods_of(config), float8_gather=False)  # counted as they are
    times = []
    for report in reports:
        messages = []
        for channel, volume in report.work.volumes.items():
            hosts = {rank // devices_per_host for rank in channel.ranks}
            group = Group(len(channel.ranks), ceil(len(channel.ranks) / len(hosts)))
            messages.append(Message(role_of(channel, dims), channel.kind, group, volume.calls, volume.n_bytes))
        times.append(step_time(device, report.work.kernels.items(), messages, methods))
    slowest = max(times, key=lambda time: time.total)
    if dims.pp > 1:
        plan = PipelinePlan.from_config(config.parallelism, config.model_spec.model, config.training.local_batch_size)
        stages = len(plan.stages) // dims.pp
        slowest = with_bubble(slowest, plan.schedule, dims.pp, plan.n_microbatches, stages)  # type: ignore[arg-type]
    memory = max(report.peak_reserved_bytes for report in reports)
    global_batch = config.training.resolve_global_batch_size(dims.dp_degree)
    return _prediction(config, dims, device, slowest, memory, global_batch)


def _prediction(
    config: Trainer.Config, dims: ParallelDims, device: Device, time: StepTime, memory: float, global_batch: int
) -> Prediction:
    seq_len = config.training.seq_len
    flops_per_token = model_flops(config)
    rate = global_batch * seq_len / time.total / dims.world_size
    return Prediction(time, memory, rate, rate * flops_per_token / device.bfloat16_flops)


def _held_by(rank: int, pipeline: PipelinePlan | None, n_layers: int) -> tuple[int, int]:
    """Return the layers of a pipeline rank, and 1 if it computes the loss."""
    if pipeline is None:
        return n_layers, 1
    names = [name for stage in pipeline.stages_of_rank(rank) for name in pipeline.stages[stage]]
    return sum(name.startswith("layers.") for name in names), int("head" in names)


def _add_volumes(
    volumes: dict[tuple[Role, CommunicationKind], Volume],
    part: Portion,
    n: float,
    passes: int,
    sharding_passes: int,
    batch: float,
) -> None:
    for (role, kind), volume in part.volumes.items():
        is_sharding = role in ("FSDP", "replicas")
        times = n * (sharding_passes if is_sharding else passes)
        if is_sharding and kind == "all-gather" and sharding_passes < passes:
            times /= 2  # a pipeline keeps gathered weights for the backward pass
        size = round(volume.n_bytes * times * (1.0 if is_sharding else batch))
        volumes[role, kind] = volumes.get((role, kind), Volume()) + Volume(round(volume.calls * times), size)


def _update(parts: list[tuple[Portion, float]], shards: int) -> Iterator[tuple[Kernel, float]]:
    import torch

    n_bytes = sum(part.update_bytes * n for part, n in parts) / shards
    yield Kernel("other", "update", torch.float32, 0, round(n_bytes)), 1


def _messages(
    volumes: Mapping[tuple[Role, CommunicationKind], Volume], dims: ParallelDims, devices_per_host: int
) -> Iterator[Message]:
    shards = dims.dp_shard * dims.cp
    places: dict[Role, tuple[int, int]] = {
        "tensor parallel": (dims.tp, 1),
        "context parallel": (dims.cp, dims.tp),
        "expert parallel": (dims.ep, dims.tp if dims.etp > 1 else 1),
        "FSDP": (shards, dims.tp),
        "replicas": (dims.dp_replicate, dims.tp * shards),
    }
    for (role, kind), volume in volumes.items():
        if role in places:
            group = Group.of(*places[role], devices_per_host)
            yield Message(role, kind, group, volume.calls, volume.n_bytes)


def _memory(
    measured: Profile,
    dims: ParallelDims,
    pipeline: PipelinePlan | None,
    rank: int,
    layers: int,
    rest: int,
    batch: float,
    accumulation: int,
) -> float:
    """Return the allocated bytes at the peak of a rank."""
    layer, other = measured.layer, measured.rest
    shards = dims.dp_shard * dims.cp
    holds_embedding = rank == 0 or rest
    states = layers * layer.state_bytes + other.state_bytes * (0.5 if pipeline else 1.0) * holds_embedding
    weights = layers * layer.parameters + other.parameters * (0.5 if pipeline else 1.0) * holds_embedding
    gradients = _GRADIENT_BYTES * weights
    if pipeline is None:
        passing = batch * (layers * layer.passing_bytes + other.passing_bytes)
        held = gradients / shards if accumulation > 1 else 0.0
        return states / shards + max(passing + held, gradients / shards)
    gathered = weights * 2
    in_flight = _in_flight(pipeline, rank)
    stages = len(pipeline.stages) // dims.pp
    saved = batch * layer.passing_bytes * layers / stages * in_flight
    return states / shards + gathered + gradients + saved + rest * batch * other.passing_bytes


def _in_flight(pipeline: PipelinePlan, rank: int) -> int:
    """Return the most pairs of a stage and a micro-batch whose results a rank keeps (arXiv:2104.04473, section 2.2)."""
    stages, total = len(pipeline.stages) // pipeline.degree, pipeline.n_microbatches
    if pipeline.schedule in ("GPipe", "LoopedBFS"):
        return stages * total
    if stages == 1:
        return min(total, pipeline.degree - rank)
    ahead = (pipeline.degree - rank - 1) * 2 + (stages - 1) * pipeline.degree + 1
    return min(stages * total, ahead)


def with_options(config: Trainer.Config, **sections: dict[str, object]) -> Trainer.Config:
    """Return a copy with other values in some sections."""
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)

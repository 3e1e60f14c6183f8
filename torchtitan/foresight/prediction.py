"""Prediction of a run's time and memory from the profile of a layer."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline import PipelinePlan
from torchtitan.dry_run.report import RankReport
from torchtitan.dry_run.work_tracker import CommunicationKind, Kernel, Volume
from torchtitan.foresight.device_choice import device_named
from torchtitan.foresight.devices import Device
from torchtitan.foresight.profile import (
    Checkpointing,
    Portion,
    Profile,
    Split,
    facts_of,
    profile,
    role_of,
    scaled_kernels,
    with_vocabulary,
)
from torchtitan.foresight.time import Group, Message, Methods, Role, StepTime, step_time, with_bubble
from torchtitan.trainer import Trainer

GIB = 2**30

USABLE = 0.95
"""Part of a device's memory that PyTorch may reserve; the CUDA context and NCCL take the rest."""

RESERVED = {False: 1.2, True: 1.12}
"""Reserved by the allocator, relative to allocated memory, in eager mode and compiled: gaps between blocks, with CUDA's
and NCCL's buffers. Fitted to rows 1, 2 and 11 of the published runs."""

_GRADIENT_BYTES, _GATHERED_BYTES = 4, 2
"""Bytes of a gradient (float32) and of a gathered weight (bfloat16)."""


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
) -> Prediction:
    """Predict the step of a run.

    Args:
        config: the run's configuration, with its layout.
        world_size: devices of the run.
        device: a device, or its name in `DEVICES`.
        devices_per_host: devices that are connected by fast links.

    Raises:
        UserError: for an impossible layout, or a model without repeated layers.
    """
    config = with_vocabulary(config)
    device = device_named(device, world_size) if isinstance(device, str) else device
    dims = layout_of(config, world_size)
    if config.activation_checkpoint.mode == "auto":
        modes = [with_checkpointing(config, mode) for mode in ("none", "selective", "full")]
        predictions = [predict(one, world_size, device, devices_per_host=devices_per_host) for one in modes]
        return next((one for one in predictions if one.memory_gib <= USABLE * device.memory_gib), predictions[-1])
    split = split_of(config, dims)
    return compose(config, dims, device, profile(config, split), devices_per_host)


def layout_of(config: Trainer.Config, world_size: int, *, compiles: bool = False) -> ParallelDims:
    """Return the degrees of a run on other devices than this host's. Raise `UserError` if they do not fit together or,
    with `compiles`, cannot be combined with the compiler."""
    parallelism = dataclasses.replace(config.parallelism, enable_async_tensor_parallel=False)  # would need a GPU here
    compile = config.compile if compiles else CompileConfig()
    return dataclasses.replace(config, parallelism=parallelism, compile=compile).check_layout(world_size)


def with_checkpointing(config: Trainer.Config, mode: Checkpointing) -> Trainer.Config:
    """Return a copy with another mode of activation checkpointing."""
    checkpointing = dataclasses.replace(config.activation_checkpoint, mode=mode)
    return dataclasses.replace(config, activation_checkpoint=checkpointing)


def split_of(config: Trainer.Config, dims: ParallelDims) -> Split:
    """Return how a configuration divides a micro-batch."""
    parallelism, training = config.parallelism, config.training
    sequences = parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size
    mode = config.activation_checkpoint.mode
    is_sharded, is_replicated = dims.dp_shard * dims.cp > 1, dims.dp_replicate > 1
    wrapper: Any = "FSDP" if is_sharded else "DDP" if is_replicated else "none"
    return Split(dims.tp, dims.cp, dims.ep, dims.etp, wrapper, sequences, mode)


def methods_of(config: Trainer.Config) -> Methods:
    """Return how a configuration computes."""
    converters = [one for one in config.model_converters if isinstance(one, Float8LinearConverter.Config)]
    float8 = next((one for one in converters if not one.emulate), None)
    is_compiled = config.compile.enable and "model" in config.compile.components
    is_async = config.parallelism.enable_async_tensor_parallel
    return Methods(is_compiled, float8 is not None, bool(float8 and float8.fsdp_float8_all_gather), is_async)


def float8_part(config: Trainer.Config, methods: Methods) -> float:
    """Return the part of the products' operations that is in float8: the head is not."""
    if not methods.uses_float8:
        return 0.0
    model = config.model_spec.model
    total = facts_of(config).parameters
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
) -> Prediction:
    """Predict a run from the profile of a layer; its micro-batch is `batch` times the profile's."""
    methods = methods_of(config)
    part = float8_part(config, methods)
    pipeline = pipeline_of(config, dims)
    global_batch = config.training.resolve_global_batch_size(dims.dp_degree)
    accumulation = global_batch // (config.training.local_batch_size * dims.dp_degree)
    times = []
    for layers, rest in {_held_by(rank, pipeline, config) for rank in range(dims.pp)}:
        portions = [(measured.layer, layers), (measured.rest, rest)]
        passes = accumulation * (pipeline.n_microbatches if pipeline else 1)
        # A pipeline gathers weights, and reduces gradients, once per local batch.
        sharding_passes = accumulation if pipeline else passes
        kernels = [
            (kernel, calls * (sharding_passes if kernel.kind == "sharding" else passes))
            for portion, n in portions
            for kernel, calls in scaled_kernels(portion, n, batch)
        ]
        kernels.append((_update(portions, dims), 1))
        volumes = _volumes(portions, dims, passes, sharding_passes, batch)
        messages = list(_messages(volumes, dims, devices_per_host))
        times.append(step_time(device, kernels, messages, methods, float8_part=part))
    time = _slowest(times, pipeline, dims)
    return _prediction(config, dims, device, time, memory_of(config, dims, measured, batch=batch), global_batch)


def memory_of(config: Trainer.Config, dims: ParallelDims, measured: Profile, *, batch: float = 1.0) -> float:
    """Return the memory that the allocator reserves on the rank that needs most; arguments as for `compose`."""
    pipeline = pipeline_of(config, dims)
    allocated = (_allocated(config, measured, dims, pipeline, rank, batch) for rank in range(dims.pp))
    return max(allocated) * RESERVED[methods_of(config).is_compiled]


def pipeline_of(config: Trainer.Config, dims: ParallelDims) -> PipelinePlan | None:
    if dims.pp == 1:
        return None
    return PipelinePlan.from_config(config.parallelism, config.model_spec.model, config.training.local_batch_size)


def _slowest(times: list[StepTime], pipeline: PipelinePlan | None, dims: ParallelDims) -> StepTime:
    slowest = max(times, key=lambda time: time.total)
    if pipeline is None:
        return slowest
    stages = len(pipeline.stages) // dims.pp
    return with_bubble(slowest, pipeline.schedule, dims.pp, pipeline.n_microbatches, stages)  # type: ignore[arg-type]


def time_of_reports(
    config: Trainer.Config, reports: list[RankReport], world_size: int, device: Device, devices_per_host: int
) -> Prediction:
    """Predict the step of a dry run from all of its operations."""
    config = with_vocabulary(config)
    dims = layout_of(config, world_size)
    methods = dataclasses.replace(methods_of(config), float8_gather=False)  # counted as they are
    times = []
    for report in reports:
        messages = []
        for channel, volume in report.work.volumes.items():
            hosts = {rank // devices_per_host for rank in channel.ranks}
            group = Group(len(channel.ranks), ceil(len(channel.ranks) / len(hosts)))
            messages.append(Message(role_of(channel, dims), channel.kind, group, volume.calls, volume.n_bytes))
        times.append(step_time(device, report.work.kernels.items(), messages, methods))
    slowest = _slowest(times, pipeline_of(config, dims), dims)
    memory = max(report.peak_reserved_bytes for report in reports)
    global_batch = config.training.resolve_global_batch_size(dims.dp_degree)
    return _prediction(config, dims, device, slowest, memory, global_batch)


def _prediction(
    config: Trainer.Config, dims: ParallelDims, device: Device, time: StepTime, memory: float, global_batch: int
) -> Prediction:
    seq_len = config.training.seq_len
    flops_per_token = facts_of(config).flops_per_token
    rate = global_batch * seq_len / time.total / dims.world_size
    return Prediction(time, memory, rate, rate * flops_per_token / device.bfloat16_flops)


def _held_by(rank: int, pipeline: PipelinePlan | None, config: Trainer.Config) -> tuple[int, int]:
    """Return the layers of a pipeline rank, and 1 if it computes the loss."""
    if pipeline is None:
        return facts_of(config).n_layers, 1
    names = [name for stage in pipeline.stages_of_rank(rank) for name in pipeline.stages[stage]]
    return sum(name.startswith("layers.") for name in names), int("head" in names)


def _volumes(
    portions: list[tuple[Portion, int]], dims: ParallelDims, passes: int, sharding_passes: int, batch: float
) -> dict[tuple[Role, CommunicationKind], Volume]:
    volumes: dict[tuple[Role, CommunicationKind], Volume] = {}
    for portion, n in portions:
        for (role, kind), volume in portion.volumes.items():
            if role == "replicas":  # see below
                continue
            times, size = float(n * passes), batch
            if role == "FSDP":
                times, size = float(n * sharding_passes), 1.0
                if kind == "all-gather" and dims.pp > 1:
                    times /= 2  # gathered weights are kept for the backward pass
            added = Volume(round(volume.calls * times), round(volume.n_bytes * times * size))
            volumes[role, kind] = volumes.get((role, kind), Volume()) + added
    if dims.dp_replicate > 1:  # replicas add up gradients once per step
        n_bytes = _GRADIENT_BYTES * sum(portion.parameters * n for portion, n in portions)
        calls = sum(n for _, n in portions)
        volumes["replicas", "all-reduce"] = Volume(calls, round(n_bytes / (dims.dp_shard * dims.cp)))
    return volumes


def _update(portions: list[tuple[Portion, int]], dims: ParallelDims) -> Kernel:
    n_bytes = sum(portion.update_bytes * n for portion, n in portions) / (dims.dp_shard * dims.cp)
    return Kernel("other", "update", torch.float32, 0, round(n_bytes))


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


def _allocated(
    config: Trainer.Config,
    measured: Profile,
    dims: ParallelDims,
    pipeline: PipelinePlan | None,
    rank: int,
    batch: float,
) -> float:
    """Return the allocated bytes at the peak of a rank. In a pipeline, the embedding and the head have half of the
    remaining weights each; gathered weights stay, and gradients accumulate before they are sharded."""
    layer, rest = measured.layer, measured.rest
    layers, has_loss = _held_by(rank, pipeline, config)
    shards, dp = dims.dp_shard * dims.cp, dims.dp_degree
    ends = 1.0 if pipeline is None else 0.5 * ((rank == 0) + has_loss)
    states = (layers * layer.state_bytes + ends * rest.state_bytes) / shards
    weights = layers * layer.parameters + ends * rest.parameters
    gradients = _GRADIENT_BYTES * weights
    if pipeline is None:
        accumulates = config.training.resolve_global_batch_size(dp) > config.training.local_batch_size * dp
        passing = sum(n * (batch * one.passing_bytes + one.gathered_bytes) for one, n in ((layer, layers), (rest, 1)))
        return states + max(passing + accumulates * gradients / shards, gradients / shards)
    saved = batch * layer.passing_bytes * layers * _in_flight(pipeline, rank) / (len(pipeline.stages) // dims.pp)
    return states + _GATHERED_BYTES * weights + gradients + saved + has_loss * batch * rest.passing_bytes


def _in_flight(pipeline: PipelinePlan, rank: int) -> int:
    """Return the most pairs of a stage and a micro-batch whose results a rank keeps (arXiv:2104.04473, section 2.2)."""
    stages, total = len(pipeline.stages) // pipeline.degree, pipeline.n_microbatches
    if pipeline.schedule in ("GPipe", "LoopedBFS"):
        return stages * total
    if stages == 1:
        return min(total, pipeline.degree - rank)
    ahead = (pipeline.degree - rank - 1) * 2 + (stages - 1) * pipeline.degree + 1
    return min(stages * total, ahead)

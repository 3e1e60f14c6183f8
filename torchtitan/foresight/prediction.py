"""Prediction of a run's time and memory from the profile of a layer."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline import PipelinePlan
from torchtitan.dry_run.fake_trainer import with_vocabulary
from torchtitan.dry_run.fitting import USABLE, with_mode
from torchtitan.dry_run.report import RankReport, reserved_bytes
from torchtitan.dry_run.work_tracker import CommunicationKind, Kernel
from torchtitan.foresight.devices import Device, device_named
from torchtitan.foresight.narrow_work import check_kernels, narrow_parts, narrowed
from torchtitan.foresight.profile import (
    Profile,
    Split,
    find_facts,
    profile,
    timed_work,
    weighted_sum,
)
from torchtitan.foresight.time import Message, Role, WorkOfRank, bubble_seconds, step_parts
from torchtitan.trainer import Trainer

_GIB = 2**30
_GATHERED_BYTES = 2
"""Bytes of a gathered weight (bfloat16)."""
_BAR = 40
"""Characters of a bar."""


@dataclass(frozen=True)
class Prediction:
    """Time of a step, and peak memory of the rank that needs most. As text: the time, and a bar for
    each part of it."""

    layout: "Layout"
    device: Device
    parts: dict[str, float]
    """Seconds of a step by part, such as products; see `step_parts`."""
    memory_gib: float
    """As the allocator reserves it."""
    tokens_per_second: float
    """Per device."""
    mfu: float
    """Model FLOP/s utilization, from 0 to 1, relative to the bfloat16 peak."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def rate_unit(self) -> str:
        """Unit of `tokens_per_second`: what the trainer counts, per second and device."""
        owner: Any = self.layout.config._owner
        return f"{owner.unit}/s per device"

    def __str__(self) -> str:
        lines = [
            f"Step on {self.device.name}: {self.seconds:,.3g} s, {self.tokens_per_second:,.0f} "
            f"{self.rate_unit}, MFU {self.mfu:.1%}"
        ]
        for name, seconds in sorted(self.parts.items(), key=lambda part: -part[1]):
            share = seconds / self.seconds
            lines.append(
                f"  {name:<18}{'█' * max(1, round(_BAR * share)):<{_BAR}} {share:6.1%} "
                f"{seconds:9.3g} s"
            )
        return "\n".join(lines)


def predict(
    config: Trainer.Config,
    world_size: int,
    device: Device | str = "h100",
    *,
    devices_per_host: int | None = None,
) -> Prediction:
    """Predict the step of a run with its configured layout; arguments as in `plan`. Raise
    `UserError` for an impossible layout, or a model without repeated layers."""
    config = with_vocabulary(config)
    device = device_named(device, world_size)
    devices_per_host = devices_per_host or device.devices_per_host
    check_kernels(config, device)
    facts, mode = find_facts(config), config.activation_checkpoint.mode
    for chosen in ("none", "selective", "full") if mode == "auto" else (mode,):
        layout = Layout.of(with_mode(config, chosen), world_size)
        prediction = Estimate(layout, profile(config, facts, layout.split)).predict(
            device, devices_per_host
        )
        if prediction.memory_gib <= USABLE * device.memory_gib:
            break
    return prediction


def predict_from_reports(
    config: Trainer.Config,
    reports: list[RankReport],
    world_size: int,
    device: Device,
    devices_per_host: int,
) -> Prediction:
    """Predict the step of a dry run from all its operations. Raise `UserError` for a device without
    the kernels of a converter."""
    check_kernels(config, device)
    with torch.device("meta"):
        whole = with_vocabulary(config).model_spec.model.build()
    layout = Layout.of(config, world_size)
    work: list[WorkOfRank] = [
        list(timed_work(one.work, layout.dims, devices_per_host)) for one in reports
    ]
    for part in narrow_parts(config, whole):
        if not part.is_in_dry_runs:
            work = [list(narrowed(one, part.format, part.of_model)) for one in work]
    memory = max(report.peak_reserved_bytes for report in reports) / _GIB
    return _prediction(layout, device, work, memory, reports[0].model_flops)


@dataclass(frozen=True)
class Layout:
    """A configuration and its degrees of parallelism."""

    config: Trainer.Config
    dims: ParallelDims

    @classmethod
    def of(cls, config: Trainer.Config, world_size: int, *, compiles: bool = False) -> "Layout":
        """Check a configuration for other devices than this host's. Raise `UserError` if the
        degrees do not fit together or, with `compiles`, cannot be combined with the compiler."""
        # would need a GPU
        parallelism = dataclasses.replace(config.parallelism, enable_async_tensor_parallel=False)
        compile = config.compile if compiles else CompileConfig()
        checked = dataclasses.replace(config, parallelism=parallelism, compile=compile)
        return cls(config, checked.check_layout(world_size))

    def __str__(self) -> str:
        """Return a few words, such as `dp_shard 32 x tp 8, local batch 16, checkpointing full`."""
        dims, training = self.dims, self.config.training
        experts = f" (ep {dims.ep})" if dims.ep > 1 else ""
        schedule = f" ({self.config.parallelism.pipeline_parallel_schedule})" if dims.pp > 1 else ""
        mode = self.config.activation_checkpoint.mode
        return (
            f"{dims}{experts}{schedule}, local batch {training.local_batch_size}, checkpointing "
            f"{mode}"
        )

    @cached_property
    def pipeline(self) -> PipelinePlan | None:
        config, batch = self.config, self.config.training.local_batch_size
        if self.dims.pp == 1:
            return None
        return PipelinePlan.from_config(config.parallelism, config.model_spec.model, batch)

    @property
    def split(self) -> Split:
        """Division of a micro-batch."""
        dims, parallelism = self.dims, self.config.parallelism
        size = self.config.training.local_batch_size
        sequences = parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else size
        wrapper: Any = "none"
        if dims.shards > 1:
            wrapper = "FSDP"
        elif dims.dp_replicate > 1:
            wrapper = "DDP"
        return Split(
            dims.tp,
            dims.cp,
            dims.ep,
            dims.etp,
            wrapper,
            sequences,
            self.config.activation_checkpoint.mode,
        )

    def of_slowest_rank(self, work: WorkOfRank) -> WorkOfRank:
        """Yield a rank's work with the causal attention of the context rank that computes most.
        Without a load balancer it has the last tokens, which see all others."""
        cp = self.dims.cp
        factor = 1.0 if self.dims.cp_load_balancer == "headtail" else (2 * cp - 1) / cp
        for one, calls in work:
            if isinstance(one, Kernel) and one.kind == "attention" and one.is_causal:
                yield one._replace(flops=round(factor * one.flops)), calls
            else:
                yield one, calls

    @property
    def accumulation(self) -> int:
        """Local batches of a step on each rank."""
        training, dp = self.config.training, self.dims.dp_degree
        return training.resolve_global_batch_size(dp) // (training.local_batch_size * dp)

    @property
    def tokens(self) -> int:
        """Tokens of a step, with the longest windows."""
        training = self.config.training
        return training.resolve_global_batch_size(self.dims.dp_degree) * training.seq_lens[-1]


@dataclass(frozen=True)
class Estimate:
    """A layout with a layer's profile, which determines time and memory."""

    layout: Layout
    measured: Profile

    @property
    def batch(self) -> float:
        """Size of the layout's micro-batch relative to the profile's."""
        return self.layout.split.sequences / self.measured.sequences

    def predict(self, device: Device, devices_per_host: int) -> Prediction:
        layout = self.layout
        held = {self._held_by(rank) for rank in range(layout.dims.pp)}
        work = [self._work(layers, n_losses, devices_per_host) for layers, n_losses in held]
        flops = self.measured.facts.flops_per_token * layout.tokens / layout.dims.world_size
        return _prediction(layout, device, work, self.memory_gib, flops)

    @property
    def memory_gib(self) -> float:
        """Memory that the allocator reserves on the rank that needs most."""
        allocated = max(map(self._allocated, range(self.layout.dims.pp)))
        return reserved_bytes(allocated, self.layout.config.compile) / _GIB

    def _held_by(self, rank: int) -> tuple[int, int]:
        """Return the layers of a pipeline rank, and 1 if it computes the loss."""
        pipeline = self.layout.pipeline
        if pipeline is None:
            return self.measured.facts.n_layers, 1
        names = [name for stage in pipeline.stages_of_rank(rank) for name in pipeline.stages[stage]]
        n_layers = sum(name.rpartition(".")[2].isdigit() for name in names)
        return n_layers, int("head" in names)

    def _work(self, layers: int, n_losses: int, devices_per_host: int) -> WorkOfRank:
        """Yield the work of a step."""
        dims = self.layout.dims
        shards = dims.shards
        pipeline = self.layout.pipeline
        ranks_and_distance: dict[Role, tuple[int, int]] = {
            "tensor parallel": (dims.tp, 1),
            "context parallel": (dims.cp, dims.tp),
            "expert parallel": (dims.ep, dims.tp if dims.etp > 1 else 1),
            "FSDP": (shards, dims.tp),
            "replicas": (dims.dp_replicate, dims.tp * shards),
        }

        def message(role: Role, kind: CommunicationKind, n_bytes: float) -> Message:
            ranks, distance = ranks_and_distance[role]
            return Message(
                role, kind, n_bytes, ranks, max(1, min(ranks, devices_per_host // distance))
            )

        batches = self.layout.accumulation
        passes = batches * (pipeline.n_microbatches if pipeline else 1)
        held = weighted_sum((layers, self.measured.layer), (n_losses, self.measured.rest))
        for one, calls in held.items():
            if isinstance(one, Kernel):
                is_sharding = one.kind == "sharding"
                scale = 1.0 if is_sharding else self.batch
                scaled = one._replace(
                    flops=round(one.flops * scale), n_bytes=round(one.n_bytes * scale)
                )
                yield scaled, calls * (batches if is_sharding else passes)
            elif isinstance(one, Message) and one.role == "FSDP":
                # A pipeline gathers weights, and reduces gradients, once per local batch.
                keeps_weights = one.kind == "all-gather" and dims.pp > 1  # for the backward pass
                yield (
                    message(one.role, one.kind, one.n_bytes),
                    calls * batches / (2 if keeps_weights else 1),
                )
            elif isinstance(one, Message) and one.role != "replicas":
                yield message(one.role, one.kind, one.n_bytes * self.batch), calls * passes
        yield Kernel("other", "update", torch.float32, 0, round(held["update"] / shards)), 1
        if dims.dp_replicate > 1:  # replicas add up gradients once per step, layer by layer
            size = held["gradients"] / shards / (layers + 1)
            yield message("replicas", "all-reduce", size), layers + 1

    def _allocated(self, rank: int) -> float:
        """Return the allocated bytes at the peak of a rank. In a pipeline, the embedding and the
        head have half of the remaining weights each; gathered weights stay, and gradients
        accumulate before they are sharded. The embedding's gradient is whole on each
        tensor-parallel rank."""
        layer, rest = self.measured.layer, self.measured.rest
        shards = self.layout.dims.shards
        pipeline = self.layout.pipeline
        batch = self.batch
        layers, n_losses = self._held_by(rank)
        ends = 1.0 if pipeline is None else 0.5 * (int(rank == 0) + n_losses)
        states = (layers * layer["state"] + ends * rest["state"]) / shards
        weights = layers * layer["parameters"] + ends * rest["parameters"]
        gradients = layers * layer["gradients"] + ends * rest["gradients"]
        passing_of_loss = rest["saved"] + rest["temporary"]
        if pipeline is None:
            passing = (
                batch * (layers * layer["saved"] + passing_of_loss)
                + layers * layer["gathered"]
                + rest["gathered"]
            )
            accumulated = gradients / shards if self.layout.accumulation > 1 else 0.0
            return states + max(passing + accumulated, gradients / shards)
        if rank == 0:
            gradients += 0.5 * rest["gradients"] * (self.layout.dims.tp - 1)
        kept = _in_flight(pipeline, rank) / (len(pipeline.stages) // pipeline.degree)
        passing = batch * (layers * kept * layer["saved"] + n_losses * passing_of_loss)
        return states + _GATHERED_BYTES * weights + gradients + passing


def _in_flight(pipeline: PipelinePlan, rank: int) -> int:
    """Return the most pairs of a stage and a micro-batch whose results a rank keeps
    (arXiv:2104.04473, section 2.2)."""
    stages, total = len(pipeline.stages) // pipeline.degree, pipeline.n_microbatches
    if pipeline.schedule in ("GPipe", "LoopedBFS"):
        return stages * total
    if stages == 1:
        return min(total, pipeline.degree - rank)
    ahead = (pipeline.degree - rank - 1) * 2 + (stages - 1) * pipeline.degree + 1
    return min(stages * total, ahead)


def _prediction(
    layout: Layout, device: Device, work: Iterable[WorkOfRank], memory_gib: float, flops: float
) -> Prediction:
    """Return the prediction for a step of the slowest rank, from the work of each; `flops` are the
    model's operations for each device."""
    config = layout.config
    is_compiled, is_async = (
        config.compile.compiles_model,
        config.parallelism.enable_async_tensor_parallel,
    )
    steps = [
        step_parts(
            device, layout.of_slowest_rank(one), is_compiled=is_compiled, is_async_tp=is_async
        )
        for one in work
    ]
    parts = max(steps, key=lambda step: sum(step.values()))
    if pipeline := layout.pipeline:
        parts["pipeline bubble"] = bubble_seconds(parts, pipeline)
        # From both neighbors, if it has them; a rank of several stages computes one while it waits
        # for another.
        received = (
            2
            * (pipeline.degree - 1)
            / pipeline.degree
            * pipeline.n_microbatches
            * layout.accumulation
        )
        parts["pipeline messages"] = received * device.collective_seconds
    seconds = sum(parts.values())
    rate = layout.tokens / seconds / layout.dims.world_size
    return Prediction(
        layout, device, parts, memory_gib, rate, flops / seconds / device.bfloat16_flops
    )

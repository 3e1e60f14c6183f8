"""Runs the dry run and reports each rank."""

import dataclasses
import functools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.process_group import init_fake_group
from torchtitan.dry_run.fake_trainer import (
    FakeTrainer,
    fake_trainer,
    images_of,
    without_data,
)
from torchtitan.dry_run.layer_replay import LayersDiffer
from torchtitan.dry_run.memory_tracker import MEMORY_KINDS, MemoryKind
from torchtitan.dry_run.work_tracker import CommunicationKind, Transfer, Work
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.redact import redacted
from torchtitan.tools.tables import open_console, print_table
from torchtitan.tools.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    clear_sharding_cache,
)
from torchtitan.trainer import Trainer

_BYTES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_OPERATIONS = {"TFLOP": 10**12, "GFLOP": 10**9, "MFLOP": 10**6}
_Row = tuple[str | float, ...]

RESERVED = {False: 1.2, True: 1.12}
"""Memory that PyTorch's CUDA allocator reserves at the peak of a step, relative to the allocations
of a dry run, which is never compiled. For an eager and a compiled model; the factors cover gaps
between blocks, workspaces of kernels, and the compiler's savings. Fitted to rows 1 (eager), 2 and
11 of the published runs (docs/foresight.md)."""


def reserved_bytes(allocated: float, compile: CompileConfig) -> float:
    """Estimate the memory that PyTorch's CUDA allocator reserves for a peak of `allocated`
    bytes."""
    return allocated * RESERVED[compile.compiles_model]


@dataclass(frozen=True)
class Traffic:
    """Communication of one step, of one kind, along one set of mesh dimensions."""

    kind: CommunicationKind
    axis: str
    """Mesh dimensions in which the communicating ranks differ, joined by `+`."""
    calls: int
    n_bytes: int
    n_bytes_sent: int


@dataclass(frozen=True)
class RankReport:
    """Memory in bytes and work of one step on one rank, which represents all ranks with the same
    pipeline stages."""

    rank: int
    stages: list[int]
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak: dict[MemoryKind, int]
    peak_bytes: int
    saved_bytes: int
    """Most bytes of activations at once."""
    peak_reserved_bytes: int
    """Estimate by `reserved_bytes`."""
    communication: list[Traffic]
    model_flops: float
    """Operations by the formula of model FLOP/s utilization, divided evenly among all ranks."""
    executed_flops: int
    """Operations of matrix products and attention on this rank, including recomputation."""
    work: Work = field(repr=False)
    """Kernels and messages of the step."""

    def to_dict(self) -> dict[str, object]:
        """Return the numbers, without individual kernels."""
        values = dataclasses.asdict(dataclasses.replace(self, work=Work()))
        del values["work"]
        return values


def report_of(trainer: FakeTrainer, compile: CompileConfig) -> RankReport:
    """Return the report of a trainer's measured step."""
    memory, dims = trainer.memory, trainer.parallel_dims
    on_host: tuple[MemoryKind, ...] = ()
    if trainer.config.training.enable_cpu_offload:
        on_host = ("parameters", "gradients", "optimizer")
    elif trainer.config.optimizer.name == "AdamWOffload":
        on_host = ("optimizer",)
    in_use = memory.use()
    peak = memory.peak(without=on_host)
    if "parameters" not in on_host:
        peak["parameters"] -= sum(
            weight.nbytes for weight in trainer.local_parameters(offloaded=True)
        )
    plan = trainer.pipeline_plan
    return RankReport(
        rank=trainer.rank,
        stages=plan.stages_of_rank(dims.coordinate("pp")) if plan else [0],
        parameters=sum(weight.numel() for weight in trainer.local_parameters()),
        parameter_bytes=in_use["parameters"],
        gradient_bytes=in_use["gradients"],
        optimizer_bytes=in_use["optimizer"],
        peak=dict(peak),
        peak_bytes=peak.total(),
        saved_bytes=memory.peak(
            without=[kind for kind in MEMORY_KINDS if kind != "activations"]
        ).total(),
        peak_reserved_bytes=round(reserved_bytes(peak.total(), compile)),
        communication=_by_axis(trainer.work.work, dims),
        model_flops=trainer.flops_per_token * trainer.tokens_per_step / dims.world_size
        + trainer.image_flops,
        executed_flops=trainer.work.flops,
        work=trainer.work.work,
    )


def _by_axis(work: Work, dims: ParallelDims) -> list[Traffic]:
    calls: Counter[tuple[CommunicationKind, str]] = Counter()
    n_bytes, sent = calls.copy(), calls.copy()
    for one, times in work.items():
        if isinstance(one, Transfer):
            key = (one.kind, axis_of(one.ranks, dims))
            calls[key] += times
            n_bytes[key] += times * one.n_bytes
            sent[key] += round(times * one.n_bytes_sent)
    return [Traffic(*key, calls[key], size, sent[key]) for key, size in n_bytes.most_common()]


def axis_of(ranks: tuple[int, ...], dims: ParallelDims) -> str:
    """Return the mesh dimensions in which these ranks differ: `dp_shard+cp`."""
    coordinates = [dims.coordinates(rank) for rank in ranks]
    return "+".join(
        name for name in dims.sizes if len({coordinate[name] for coordinate in coordinates}) > 1
    )


def dry_run(config: Trainer.Config, world_size: int) -> list[RankReport]:
    """Simulate one step of a run of `world_size` ranks in this process, without their memory. Print
    a report for each rank with different stages, and write all reports to
    `{dump_folder}/dry_run.json`. Raise `UserError` for an invalid configuration."""
    for component in (config.tokenizer, config.validator, config.checkpoint):
        component.validate()
    if config.activation_checkpoint.mode == "memory_budget":
        raise UserError(
            "--activation_checkpoint.mode memory_budget needs the compiler, which a dry run does "
            "not use; set none, selective or full"
        )
    if config.compile.enable:
        logger.warning(
            "--compile.enable changes only the estimates of a dry run: reserved memory and time"
        )
    dry_config = without_data(config)
    dry_config.check(world_size, dry_run=True)
    spec = config.model_spec
    training = config.training
    mode = config.activation_checkpoint.mode
    owner: Any = config._owner
    amount = owner.amount(training.local_batch_size, training.seq_len)
    logger.info(
        f"{spec.name} {spec.flavor} on {world_size} ranks ({dry_config.check_layout(world_size)}): "
        f"local batch {amount}, activation checkpointing "
        f"{'selective' if mode == 'auto' else mode}, computed in "
        f"{training.mixed_precision_param}"
    )
    reports = []
    for report in reports_of(config, world_size):
        reports.append(report)
        if config.parallelism.pipeline_parallel_degree > 1:
            logger.info("rank %d: %.2f GiB at most", report.rank, report.peak_bytes / 2**30)
    _print(reports)
    path = Path(config.dump_folder) / "dry_run.json"
    ranks = [report.to_dict() for report in reports]
    document = {"world_size": world_size, "ranks": ranks, "config": config.to_dict()}
    durable.write(path, json.dumps(redacted(document), indent=2) + "\n")
    logger.info("the same numbers in bytes: %s", path)
    return reports


def reports_of(config: Trainer.Config, world_size: int) -> Iterator[RankReport]:
    """Simulate one step on each rank with different pipeline stages, without output. Raise
    `UserError` if the model reads values."""
    dry_config = without_data(config)
    for rank in range(0, world_size, world_size // config.parallelism.pipeline_parallel_degree):
        run = functools.partial(_simulate, config, dry_config, rank, world_size)
        try:
            report = run()
        except LayersDiffer as error:
            try:
                report = run(last_layers=error.lasts)
            except LayersDiffer:
                report = run(replays_layers=False)
        yield report


def _simulate(
    config: Trainer.Config,
    dry_config: Trainer.Config,
    rank: int,
    world_size: int,
    *,
    last_layers: dict[int, int] | None = None,
    replays_layers: bool = True,
) -> RankReport:
    """Simulate one step on a rank; the last arguments are attributes of the trainer. Raise
    `LayersDiffer`, or `UserError` if the model reads values."""
    exception_hook = sys.excepthook
    if world_size > 1:
        init_fake_group(rank, world_size)
    try:
        trainer = fake_trainer(dry_config)
        trainer.last_layers = last_layers
        if not replays_layers:
            trainer.replays_layers = False
        trainer.measure_step(images_of(config, trainer.sequences_per_sample))
        return report_of(trainer, config.compile)
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise UserError(
            f"a dry run has no values, but {config.model_spec.name} reads some "
            f"({error.func}), as to loop over the experts that tokens chose; run a step on "
            "the device instead"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = exception_hook  # each process group prefixes a traceback with its rank
        # PyTorch caches the process groups of one rank, and would reuse them for the mesh of the
        # next rank.
        clear_sharding_cache()


def _print(reports: Sequence[RankReport]) -> None:
    kinds = [kind for kind in MEMORY_KINDS if any(report.peak[kind] for report in reports)]
    states: list[_Row] = []
    peaks: list[_Row] = []
    messages: list[_Row] = []
    work: list[_Row] = []
    for one in reports:
        rank, stages = str(one.rank), ", ".join(map(str, one.stages))
        sizes = (one.parameter_bytes, one.gradient_bytes, one.optimizer_bytes)
        states.append((rank, stages, f"{one.parameters:,}", *sizes))
        peaks.append(
            (rank, *(one.peak[kind] for kind in kinds), one.peak_bytes, one.peak_reserved_bytes)
        )
        messages += [
            (rank, m.kind, m.axis, f"{m.calls:,}", m.n_bytes, m.n_bytes_sent)
            for m in one.communication
        ]
        work.append((rank, one.model_flops, one.executed_flops))
    _print_table(
        "Memory between steps", "rank stages parameters weights gradients optimizer".split(), states
    )
    _print_table("Peak of a step", ["rank", *kinds, "allocated", "reserved"], peaks)
    _print_table("Communication of a step", "rank kind axis calls size sent".split(), messages)
    _print_table("Operations of a step", ["rank", "model", "executed"], work, _OPERATIONS)


def _print_table(
    title: str, columns: Sequence[str], rows: Sequence[_Row], units: dict[str, int] = _BYTES
) -> None:
    cells = [cell for row in rows for cell in row]
    largest = max((cell for cell in cells if not isinstance(cell, str)), default=0)
    unit = next((unit for unit, size in units.items() if largest >= size), list(units)[-1])
    shown = [[_shown(cell, units[unit]) for cell in row] for row in rows]
    print_table(
        open_console(), f"{title} ({unit})", columns, shown, numbers={*columns} - {"kind", "axis"}
    )


def _shown(cell: str | float, unit: int) -> str:
    if isinstance(cell, str):
        return cell
    value = cell / unit
    if value == 0:
        return "0"
    return f"{value:,.2f}" if value >= 0.005 else "<0.01"

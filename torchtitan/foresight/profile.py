"""Measures a layer's work and memory on one rank, by dry runs of the same model with few layers."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import ceil
from typing import Any, Literal, NamedTuple

import torch

from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.dry_run.fitting import with_mode
from torchtitan.dry_run.report import RankReport, axis_of, reports_of
from torchtitan.dry_run.work_tracker import CommunicationKind, Kernel, Work
from torchtitan.foresight.narrow_work import NARROW, NarrowPart, narrow_parts, narrowed
from torchtitan.foresight.time import Message, Role
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

_SHARDS = 64
"""Data-parallel ranks of the small dry runs: enough that shards take little memory."""

_MOST_SPECIAL_LAYERS = 8
"""Layers at the beginning that may differ from the others."""


class Split(NamedTuple):
    """Division of a micro-batch: the parts that change a layer's work."""

    tp: int
    cp: int
    ep: int
    etp: int
    data_parallel: Literal["FSDP", "DDP", "none"]
    """Wrapper of the layers. HSDP is FSDP here."""
    sequences: int
    """Windows of a micro-batch on one rank."""
    checkpointing: str
    """`activation_checkpoint.mode`."""


Size = Literal["parameters", "state", "gradients", "update", "gathered", "saved", "temporary"]
"""Parameters of some layers on this rank; bytes of weights and optimizer (`state`), of gradients,
which frozen weights lack, and those that the optimizer reads and writes (`update`), all before FSDP
shards them; bytes at the peak of gathered weights, of saved activations, and of the rest
(`temporary`)."""


Portion = defaultdict[Kernel | Message | Size, float]
"""Work of some layers in one forward and backward pass, as numbers of calls, and their sizes."""


def _portion(items: Iterable[tuple[Kernel | Message | Size, float]]) -> Portion:
    total: Portion = defaultdict(float)
    for one, count in items:
        total[one] += count
    return total


def weighted_sum(*terms: tuple[int, Portion]) -> Portion:
    """Return a sum of portions, each times a factor."""
    return _portion(
        (key, factor * count) for factor, portion in terms for key, count in portion.items()
    )


class Facts(NamedTuple):
    """Sizes of a whole model."""

    n_layers: int
    n_special: int
    """First layers, at least 2, after which all layers have equal numbers of parameters."""
    flops_per_token: float
    """Forward and backward, by the formula of model FLOP/s utilization."""
    narrow: tuple[NarrowPart, ...]
    """Products of each converter to a narrow type."""


class Profile(NamedTuple):
    """One layer, and everything else: embedding, head, loss."""

    layer: Portion
    rest: Portion
    facts: Facts
    sequences: int
    """Windows of its micro-batch."""


def find_facts(config: Trainer.Config) -> Facts:
    """Return the sizes of a model. Raise `UserError` unless it consists of repeated layers, and for
    narrow layers that every device emulates."""
    model: Any = config.model_spec.model
    if not hasattr(model, "n_layers"):
        raise UserError(
            f"{type(model).__qualname__} has no n_layers; foresight needs a model of repeated "
            "layers"
        )

    def build(n_layers: int) -> Any:
        smaller = dataclasses.replace(model, n_layers=n_layers)
        try:
            smaller.validate()
        except UserError as error:
            raise UserError(
                f"foresight needs a model whose first layers also form a model: {error}"
            ) from error
        with torch.device("meta"):
            return smaller.build()

    whole, n_layers = build(model.n_layers), model.n_layers
    total, flops = whole.num_parameters(), whole.flops_per_token(config.training.seq_lens[-1])
    for first in range(2, 2 + _MOST_SPECIAL_LAYERS):
        few, more = (build(n).num_parameters() for n in (first, first + 1))
        if few + (n_layers - first) * (more - few) == total:
            return Facts(n_layers, first, flops, narrow_parts(config, whole))
    raise UserError(
        "the layers of this model differ in size: foresight needs equal layers after the first 8"
    )


def profile(config: Trainer.Config, facts: Facts, split: Split) -> Profile:
    """Return the work and memory of a layer, by the difference of two dry runs."""
    few, more = (_measure(config, split, n) for n in (facts.n_special, facts.n_special + 1))
    layer = weighted_sum((1, more), (-1, few))
    layer.pop(
        "temporary", None
    )  # which depends on the moment of the peak, not on the number of layers
    if config.parallelism.fsdp_reshard_after_forward != "never":
        layer.pop("gathered", None)
    rest = weighted_sum((1, few), (-facts.n_special, layer))
    for one in facts.narrow:
        layer = _portion(
            narrowed(layer.items(), one.format, one.of_layers, gathers=one.gathers_float8)
        )
    return Profile(layer, rest, facts, split.sequences)


def _measure(config: Trainer.Config, split: Split, n_layers: int) -> Portion:
    shards = max(_SHARDS, split.ep * split.etp) if split.data_parallel == "FSDP" else 1
    replicas = 2 if split.data_parallel == "DDP" else 1
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=replicas,
        tensor_parallel_degree=split.tp,
        context_parallel_degree=split.cp,
        context_parallel_load_balancer=config.parallelism.context_parallel_load_balancer,
        expert_parallel_degree=split.ep,
        expert_tensor_parallel_degree=split.etp,
        fsdp_reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
        disable_loss_parallel=config.parallelism.disable_loss_parallel,
    )
    spec = config.model_spec
    shallow = dataclasses.replace(spec.model, n_layers=n_layers)  # type: ignore[call-arg]
    small = dataclasses.replace(
        with_mode(config, split.checkpointing),
        model_spec=dataclasses.replace(spec, model=shallow),
        model_converters=[one for one in config.model_converters if not isinstance(one, NARROW)],
        parallelism=parallelism,
        training=dataclasses.replace(
            config.training,
            local_batch_size=split.sequences,
            global_batch_size=-1,
            enable_cpu_offload=False,
        ),
        compile=CompileConfig(),
    )
    world_size = replicas * shards * split.cp * split.tp
    dims = small.check_layout(world_size)
    (report,) = reports_of(small, world_size)
    return _portion_of(report, dims)


def _portion_of(report: RankReport, dims: ParallelDims) -> Portion:
    shards, peak = dims.shards, report.peak
    state, gathered = peak["parameters"] + peak["optimizer"], peak["gathered parameters"]
    portion: Portion = defaultdict(
        float,
        {
            "parameters": report.parameters * shards,
            "state": state * shards,
            "gradients": report.gradient_bytes * shards,
            "gathered": gathered,
            "saved": report.saved_bytes,
            "temporary": report.peak_bytes - state - gathered - report.saved_bytes,
        },
    )
    for one, calls in timed_work(report.work, dims, devices_per_host=1):
        if isinstance(one, Message):
            portion[one._replace(ranks=1)] += calls  # a layout sets the number of ranks
        elif one.phase == "update":  # it updates all layers at once
            portion["update"] += calls * one.n_bytes * shards
        else:
            portion[one] += calls
    return portion


def timed_work(
    work: Work, dims: ParallelDims, devices_per_host: int
) -> Iterator[tuple[Kernel | Message, int]]:
    """Yield the kernels of a dry run, and the messages whose time counts."""
    for one, calls in work.items():
        if isinstance(one, Kernel):
            yield one, calls
        elif role := _role_of(one.kind, axis_of(one.ranks, dims)):
            n, hosts = len(one.ranks), len({rank // devices_per_host for rank in one.ranks})
            yield Message(role, one.kind, one.n_bytes, n, ceil(n / hosts)), calls


def _role_of(kind: CommunicationKind, axis: str) -> Role | None:
    """Return why ranks that differ in these mesh dimensions (`dp_shard+cp`) communicate. None: no
    time is counted."""
    roles: dict[str, Role] = {
        "tp": "tensor parallel",
        "cp": "context parallel",
        "dp_replicate": "replicas",
    }
    if kind in ("send", "receive"):
        return None
    if kind in ("all-gather", "reduce-scatter") and "dp_shard" in axis.split("+"):
        return "FSDP"
    return "expert parallel" if kind == "all-to-all" else roles.get(axis)

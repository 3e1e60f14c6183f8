"""Work and memory of a model's layers on one rank, from dry runs of the same model with few layers."""

import dataclasses
from collections import Counter
from typing import Any, Literal, NamedTuple

import torch

from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.dry_run.fitting import with_mode
from torchtitan.dry_run.report import RankReport, axis_of, reports_of
from torchtitan.dry_run.work_tracker import CommunicationKind, Kernel
from torchtitan.foresight.time import FLOAT8_CASTS, Role
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

_SHARDS = 64
"""Data-parallel ranks of the small dry runs: enough that shards take little memory."""

_MOST_SPECIAL_LAYERS = 8
"""Layers at the beginning that may differ from the others."""


class Split(NamedTuple):
    """Division of a micro-batch, as far as the work of a layer depends on it."""

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


Size = Literal["parameters", "state", "update", "gathered", "saved", "temporary"]
"""Parameters of some layers on this rank; bytes of weights and optimizer (`state`), and those that the optimizer reads
and writes (`update`), all before FSDP shards them; bytes at the peak of gathered weights, of saved activations, and of
the rest (`temporary`)."""


class Portion(NamedTuple):
    """Work and memory of some layers in one forward and backward pass."""

    kernels: Counter[Kernel]
    transfers: Counter[tuple[Role, CommunicationKind, int]]
    """Messages by role, kind and bytes."""
    sizes: Counter[Size]

    @classmethod
    def of_terms(cls, *terms: tuple[int, "Portion"]) -> "Portion":
        """Return a sum of portions, each times a factor."""
        sums = cls(Counter(), Counter(), Counter())
        for factor, portion in terms:
            counters: Any = zip(sums, portion, strict=True)
            for total, counts in counters:
                total.update({key: factor * count for key, count in counts.items()})
        return sums


class Facts(NamedTuple):
    """Sizes of a whole model."""

    n_layers: int
    n_special: int
    """First layers, at least 2, after which all layers have equal numbers of parameters."""
    flops_per_token: float
    """Forward and backward, by the formula of model FLOP/s utilization."""


class Profile(NamedTuple):
    """One layer, and everything else: embedding, head, loss."""

    layer: Portion
    rest: Portion
    facts: Facts
    sequences: int
    """Windows of its micro-batch."""


def facts_of(config: Trainer.Config) -> Facts:
    """Return the facts of a model. Raise `UserError` unless it consists of repeated layers."""
    model: Any = config.model_spec.model
    if not hasattr(model, "n_layers"):
        raise UserError(f"{type(model).__qualname__} has no n_layers; foresight needs a model of repeated layers")

    def build(n_layers: int) -> Any:
        smaller = dataclasses.replace(model, n_layers=n_layers)
        try:
            smaller.validate()
        except UserError as error:
            raise UserError(f"foresight needs a model whose first layers are a model, too: {error}") from error
        with torch.device("meta"):
            return smaller.build()

    whole, n_layers = build(model.n_layers), model.n_layers
    total, flops = whole.num_parameters(), whole.flops_per_token(config.training.seq_lens[-1])
    for first in range(2, 2 + _MOST_SPECIAL_LAYERS):
        few, more = (build(n).num_parameters() for n in (first, first + 1))
        if few + (n_layers - first) * (more - few) == total:
            return Facts(n_layers, first, flops)
    raise UserError("the layers of this model differ in size: foresight needs layers that are alike after the first 8")


def profile(config: Trainer.Config, facts: Facts, split: Split) -> Profile:
    """Return the work and memory of a layer, by the difference of two dry runs."""
    few, more = (_measure(config, split, n) for n in (facts.n_special, facts.n_special + 1))
    layer = Portion.of_terms((1, more), (-1, few))
    del layer.sizes["temporary"]  # which depends on the moment of the peak, not on the number of layers
    if config.parallelism.fsdp_reshard_after_forward != "never":
        del layer.sizes["gathered"]
    rest = Portion.of_terms((1, few), (-facts.n_special, layer))
    for one in config.model_converters:
        if isinstance(one, Float8LinearConverter.Config) and not one.emulate:
            layer = _in_float8(layer, one)  # all but the head, which is in `rest`
    return Profile(layer, rest, facts, split.sequences)


def _in_float8(layer: Portion, converter: Float8LinearConverter.Config) -> Portion:
    """Return a layer with its products in bfloat16 replaced by products in float8, and kernels that cast."""
    kernels, transfers = Counter[Kernel](), Counter[tuple[Role, CommunicationKind, int]]()
    for kernel, calls in layer.kernels.items():
        if kernel.kind == "product" and kernel.dtype == torch.bfloat16:
            cast = kernel._replace(kind="other", flops=0, n_bytes=round(FLOAT8_CASTS * kernel.n_bytes))
            product = kernel._replace(dtype=torch.float8_e4m3fn, n_bytes=kernel.n_bytes // 2)
            kernels.update({cast: calls, product: calls})
        else:
            kernels[kernel] += calls
    for (role, kind, n_bytes), calls in layer.transfers.items():
        is_halved = converter.fsdp_float8_all_gather and (role, kind) == ("FSDP", "all-gather")
        transfers[role, kind, n_bytes // 2 if is_halved else n_bytes] += calls
    return layer._replace(kernels=kernels, transfers=transfers)


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
    small = dataclasses.replace(
        with_mode(config, split.checkpointing),
        model_spec=dataclasses.replace(spec, model=dataclasses.replace(spec.model, n_layers=n_layers)),  # type: ignore[call-arg]
        model_converters=[one for one in config.model_converters if not isinstance(one, Float8LinearConverter.Config)],
        parallelism=parallelism,
        training=dataclasses.replace(
            config.training, local_batch_size=split.sequences, global_batch_size=-1, enable_cpu_offload=False
        ),
        compile=CompileConfig(),
    )
    world_size = replicas * shards * split.cp * split.tp
    dims = small.check_layout(world_size)
    (report,) = reports_of(small, world_size)
    return _portion_of(report, dims)


def _portion_of(report: RankReport, dims: ParallelDims) -> Portion:
    shards, peak = dims.dp_shard * dims.cp, report.peak
    kernels, transfers = report.work.kernels.copy(), Counter[tuple[Role, CommunicationKind, int]]()
    for one, calls in report.work.transfers.items():
        if role := role_of(one.kind, axis_of(one.ranks, dims)):
            transfers[role, one.kind, one.n_bytes] += calls
    updates = [kernel for kernel in kernels if kernel.phase == "update"]  # which take all layers at once
    updated = sum(kernel.n_bytes * kernels.pop(kernel) for kernel in updates)
    state, gathered = peak["parameters"] + peak["optimizer"], peak["gathered parameters"]
    sizes: dict[Size, int] = {
        "parameters": report.parameters * shards,
        "state": state * shards,
        "update": updated * shards,
        "gathered": gathered,
        "saved": report.saved_bytes,
        "temporary": report.peak_bytes - state - gathered - report.saved_bytes,
    }
    return Portion(kernels, transfers, Counter(sizes))


def role_of(kind: CommunicationKind, axis: str) -> Role | None:
    """Return why ranks that differ in these mesh dimensions (`dp_shard+cp`) communicate. None: no time is counted."""
    roles: dict[str, Role] = {"tp": "tensor parallel", "cp": "context parallel", "dp_replicate": "replicas"}
    if kind == "all-to-all":
        return "expert parallel"
    if kind in ("send", "receive"):
        return None
    is_sharding = kind in ("all-gather", "reduce-scatter") and "dp_shard" in axis.split("+")
    return "FSDP" if is_sharding else roles.get(axis)

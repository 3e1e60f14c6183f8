"""Work and memory of a model's layers on one rank, from dry runs of the same model with few layers."""

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.dry_run.report import RankReport, axis_of, reports_of
from torchtitan.dry_run.work_tracker import Channel, CommunicationKind, Kernel, Volume, Work
from torchtitan.foresight.time import Role
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

_SHARDS = 64
"""Data-parallel ranks of the small dry runs: enough that shards take little memory."""

_MOST_SPECIAL_LAYERS = 8
"""Layers at the beginning that may differ from the others."""


Checkpointing = Literal["none", "full", "selective", "memory_budget", "auto"]


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
    checkpointing: Checkpointing
    """`activation_checkpoint.mode`."""


@dataclass
class Portion:
    """Work, parameters and memory of some layers in one forward and backward pass."""

    kernels: Counter[Kernel] = field(default_factory=Counter)
    volumes: dict[tuple[Role, CommunicationKind], Volume] = field(default_factory=dict)
    parameters: float = 0.0
    """On this rank, before FSDP shards them."""
    state_bytes: float = 0.0
    """Weights and optimizer state, before FSDP shards them."""
    passing_bytes: float = 0.0
    """Peak memory other than weights, optimizer state and gathered weights."""
    gathered_bytes: float = 0.0
    """Weights that FSDP has gathered at the peak."""
    update_bytes: float = 0.0
    """Memory traffic of the optimizer, before FSDP shards the weights."""

    def __sub__(self, other: "Portion") -> "Portion":
        """Return the difference, without kernels that then have no calls left."""
        volumes = {key: volume - other.volumes.get(key, Volume()) for key, volume in self.volumes.items()}
        names = ("parameters", "state_bytes", "passing_bytes", "gathered_bytes", "update_bytes")
        numbers = {name: getattr(self, name) - getattr(other, name) for name in names}
        return Portion(self.kernels - other.kernels, volumes, **numbers)


@dataclass
class Profile:
    """One layer, and everything else: embedding, head, loss."""

    layer: Portion
    rest: Portion


def with_vocabulary(config: Trainer.Config) -> Trainer.Config:
    """Return a configuration whose model has the size of the tokenizer's vocabulary, if it has none."""
    if config.model_spec.model.vocab_size is not None:
        return config
    return config.resolve(config.tokenizer.build(path=config.hf_assets_path))


class Facts(NamedTuple):
    """Sizes of a whole model."""

    n_layers: int
    parameters: int
    flops_per_token: float
    """Forward and backward, by the formula of model FLOP/s utilization."""


_FACTS: dict[tuple[str, int], Facts] = {}


def facts_of(config: Trainer.Config) -> Facts:
    """Return the facts of a model. Raise `UserError` if it has no layers."""
    model: Any = config.model_spec.model
    key = (repr(model), config.training.seq_len)
    if key not in _FACTS:
        if not hasattr(model, "n_layers"):
            raise UserError(f"{type(model).__qualname__} has no n_layers; foresight needs a model of repeated layers")
        with torch.device("meta"):
            whole = model.build()
        flops_per_token = whole.flops_per_token(config.training.seq_len)
        _FACTS[key] = Facts(model.n_layers, whole.num_parameters(), flops_per_token)
    return _FACTS[key]


_FIRST: dict[str, int] = {}


def first_like_all(config: Trainer.Config) -> int:
    """Return the number of first layers, at least 2, after which all layers have equal numbers of parameters. Raise
    `UserError` if there are too many."""
    model: Any = config.model_spec.model
    if (key := repr(model)) not in _FIRST:
        _FIRST[key] = _count_special_layers(model, facts_of(config).parameters)
    return _FIRST[key]


def _count_special_layers(model: Any, total: int) -> int:
    @functools.cache
    def count(n: int) -> int:
        smaller = dataclasses.replace(model, n_layers=n)
        try:
            smaller.validate()
        except UserError as error:
            raise UserError(f"foresight needs a model whose first layers are a model, too: {error}") from error
        with torch.device("meta"):
            return int(smaller.build().num_parameters())

    for first in range(2, 2 + _MOST_SPECIAL_LAYERS):
        if count(first) + (model.n_layers - first) * (count(first + 1) - count(first)) == total:
            return first
    raise UserError("the layers of this model differ in size: foresight needs layers that are alike after the first 8")


def profile(config: Trainer.Config, split: Split) -> Profile:
    """Return the work and memory of a layer, by the difference of two dry runs."""
    first = first_like_all(config)
    few, more = (_measure(config, split, n) for n in (first, first + 1))
    layer = more - few
    return Profile(layer, rest=functools.reduce(operator.sub, [layer] * first, few))


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
        config,
        model_spec=dataclasses.replace(spec, model=dataclasses.replace(spec.model, n_layers=n_layers)),  # type: ignore[call-arg]
        model_converters=[one for one in config.model_converters if not isinstance(one, Float8LinearConverter.Config)],
        parallelism=parallelism,
        training=dataclasses.replace(
            config.training, local_batch_size=split.sequences, global_batch_size=-1, enable_cpu_offload=False
        ),
        activation_checkpoint=dataclasses.replace(config.activation_checkpoint, mode=split.checkpointing),
        compile=CompileConfig(),
    )
    world_size = replicas * shards * split.cp * split.tp
    dims = small.check_layout(world_size)
    (report,) = reports_of(small, world_size)
    return _portion_of(report, dims)


def _portion_of(report: RankReport, dims: ParallelDims) -> Portion:
    kernels: Counter[Kernel] = Counter()
    update_bytes = 0
    for kernel, calls in report.work.kernels.items():
        if kernel.phase == "update":  # its operations take all layers at once
            update_bytes += kernel.n_bytes * calls
        else:
            kernels[kernel] = calls
    shards = dims.dp_shard * dims.cp
    states = report.parameter_bytes + report.optimizer_bytes
    at_peak = report.peak["parameters"] + report.peak["optimizer"]
    return Portion(
        kernels,
        volumes_by_role(report.work, dims),
        parameters=report.parameters * shards,
        state_bytes=states * shards,
        passing_bytes=report.peak_bytes - at_peak - report.peak["gathered parameters"],
        gathered_bytes=report.peak["gathered parameters"],
        update_bytes=update_bytes * shards,
    )


def volumes_by_role(work: Work, dims: ParallelDims) -> dict[tuple[Role, CommunicationKind], Volume]:
    """Return the communication by its purpose."""
    volumes: dict[tuple[Role, CommunicationKind], Volume] = {}
    for channel, volume in work.volumes.items():
        key = (role_of(channel, dims), channel.kind)
        volumes[key] = volumes.get(key, Volume()) + volume
    return volumes


def role_of(channel: Channel, dims: ParallelDims) -> Role:
    """Return why ranks communicate: by the kind of communication, and the mesh dimensions in which they differ."""
    axes = set(axis_of(channel.ranks, dims).split("+"))
    roles: dict[str, Role] = {"tp": "tensor parallel", "cp": "context parallel", "dp_replicate": "replicas"}
    if channel.kind == "all-to-all":
        return "expert parallel"
    if channel.kind in ("send", "receive"):
        return "pipeline"
    if len(axes) == 1 and (role := roles.get(next(iter(axes)))):
        return role
    is_sharding = channel.kind in ("all-gather", "reduce-scatter") and "dp_shard" in axes
    return "FSDP" if is_sharding else "all"


def scaled_kernels(portion: Portion, factor: float, batch: float) -> Iterator[tuple[Kernel, float]]:
    """Yield a portion's kernels with their calls times `factor`, for a batch that is `batch` times as large."""
    for kernel, calls in portion.kernels.items():
        if batch != 1 and kernel.kind != "sharding":
            kernel = kernel._replace(flops=round(kernel.flops * batch), n_bytes=round(kernel.n_bytes * batch))
        yield kernel, calls * factor

"""Measures the mean layer's work and memory on one rank, by dry runs of the same model with few
layers."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.dry_run.fitting import with_mode
from torchtitan.dry_run.report import RankReport, axis_of, reports_of
from torchtitan.dry_run.work_tracker import CommunicationKind, Kernel, Work
from torchtitan.foresight.narrow_work import NARROW, NarrowPart, narrow_parts, narrowed
from torchtitan.foresight.time import Message, Role
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

_SHARDS = 64
"""Data-parallel ranks of the small dry runs: enough that shards take little memory."""

_MOST_FIRST_LAYERS = 16
"""Layers of the smallest dry run; layers of kinds that only occur among these are counted in it."""

_OTHER_THAN_LAYERS = 4
"""Layers whose dry run takes as long as the dry run of everything else."""


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


def weighted_sum(*terms: tuple[float, Portion]) -> Portion:
    """Return a sum of portions, each times a factor."""
    return _portion(
        (key, factor * count) for factor, portion in terms for key, count in portion.items()
    )


class Prefixes(NamedTuple):
    """Models of the first layers, whose differences give the mean layer after the first ones."""

    lengths: tuple[int, ...]
    """Numbers of layers, ascending."""
    weights: tuple[float, ...]
    """Factors of the models in the mean layer; their sum is 0."""


class Facts(NamedTuple):
    """Sizes of a whole model."""

    n_layers: int
    prefixes: Prefixes
    flops_per_token: float
    """Forward and backward, by the formula of model FLOP/s utilization."""
    narrow: tuple[NarrowPart, ...]
    """Products of each converter to a narrow type."""


class Profile(NamedTuple):
    """The mean layer, and everything else: embedding, head, loss, and what the first layers differ
    by."""

    layer: Portion
    rest: Portion
    facts: Facts
    sequences: int
    """Windows of its micro-batch."""


def find_facts(config: Trainer.Config) -> Facts:
    """Return the sizes of a model. Raise `UserError` unless it consists of layers of a few kinds,
    and for narrow layers that every device emulates."""
    model = config.model_spec.model
    n_layers = getattr(model, "n_layers", 0)
    if not n_layers:
        raise UserError(
            f"{type(model).__qualname__} counts no repeated layers; foresight takes the time and "
            "memory of a model from them"
        )

    def build(n_layers: int) -> BaseModel:
        with torch.device("meta"):
            return model.with_layers(n_layers).build()

    whole = build(n_layers)
    prefixes = find_prefixes(model.layer_kinds, functools.partial(_is_model, model))
    first = build(prefixes.lengths[0]).num_parameters()
    mean = sum(
        weight * build(n).num_parameters()
        for n, weight in zip(prefixes.lengths, prefixes.weights, strict=True)
    )
    total = whole.num_parameters()
    if abs(first + (n_layers - prefixes.lengths[0]) * mean - total) > 1e-6 * total:
        raise UserError(
            "the layers of this model differ in more than their kinds, so foresight cannot take "
            "its size from few layers"
        )
    flops = whole.flops_per_token(config.training.seq_lens[-1])
    return Facts(n_layers, prefixes, flops, narrow_parts(config, whole))


def _is_model(model: BaseModel.Config, n_layers: int) -> bool:
    try:
        model.with_layers(n_layers).validate()
    except UserError:
        return False
    return True


def find_prefixes(kinds: Sequence[object], is_model: Callable[[int], bool]) -> Prefixes:
    """Return models of the first layers whose differences give the mean of the layers after the
    shortest model, as a number of layers of each kind: the models that are measured fastest. Raise
    `UserError` if no models have such differences.

    Args:
        kinds: the kind of each layer.
        is_model: whether a number of first layers is a model.
    """
    columns = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    counts_NK = np.zeros((len(kinds) + 1, len(columns)))
    for index, kind in enumerate(kinds):
        counts_NK[index + 1] = counts_NK[index]
        counts_NK[index + 1, columns[kind]] += 1
    least = min(2, max(1, len(kinds) - 1))
    is_model = functools.cache(is_model)
    found = [
        prefixes
        for first in range(least, min(_MOST_FIRST_LAYERS, len(kinds)) + 1)
        if is_model(first) and (prefixes := _prefixes_from(first, counts_NK, is_model))
    ]
    if not found:
        raise UserError(
            "foresight needs a model of repeated layers, of which the first also form a model"
        )
    return min(found, key=lambda one: sum(_OTHER_THAN_LAYERS + n for n in one.lengths))


def _prefixes_from(
    first: int, counts_NK: npt.NDArray[np.float64], is_model: Callable[[int], bool]
) -> Prefixes | None:
    """Return the prefixes whose shortest one has `first` layers."""
    n_layers = len(counts_NK) - 1
    wanted_K = (counts_NK[-1] - counts_NK[first]) / max(1, n_layers - first)
    lengths: list[int] = []
    rows_PK = np.zeros((0, counts_NK.shape[1]))
    for n in range(first + 1, n_layers + 1):
        more_PK = np.vstack([rows_PK, counts_NK[n] - counts_NK[first]])
        if np.linalg.matrix_rank(more_PK) == len(rows_PK) or not is_model(n):
            continue
        rows_PK = more_PK
        lengths.append(n)
        weights_P, *_ = np.linalg.lstsq(rows_PK.T, wanted_K, rcond=None)
        if np.allclose(weights_P @ rows_PK, wanted_K, rtol=0, atol=1e-9):
            pairs = [
                (n, w) for n, w in zip(lengths, weights_P.tolist(), strict=True) if abs(w) > 1e-9
            ]
            of_first = -sum(weight for _, weight in pairs)
            every = [(first, of_first), *pairs]
            return Prefixes(tuple(n for n, _ in every), tuple(w for _, w in every))
    return None


def profile(config: Trainer.Config, facts: Facts, split: Split) -> Profile:
    """Return the work and memory of the mean layer, by the differences of dry runs."""
    lengths, weights = facts.prefixes
    measured = [_measure(config, split, n) for n in lengths]
    layer = weighted_sum(*zip(weights, measured, strict=True))
    # which depends on the moment of the peak, not on the number of layers
    layer.pop("temporary", None)
    if config.parallelism.fsdp_reshard_after_forward != "never":
        layer.pop("gathered", None)
    rest = weighted_sum((1, measured[0]), (-lengths[0], layer))
    rest["temporary"] = max(portion["temporary"] for portion in measured)
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
    small = dataclasses.replace(
        with_mode(config, split.checkpointing),
        model_spec=dataclasses.replace(spec, model=spec.model.with_layers(n_layers)),
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

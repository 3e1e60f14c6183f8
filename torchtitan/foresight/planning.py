"""The best layouts of a run: enumerate, prune by memory, rank by predicted speed."""

import dataclasses
import functools
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.foresight.device_choice import device_named
from torchtitan.foresight.devices import Device
from torchtitan.foresight.prediction import GIB, USABLE, Prediction, compose, layout_of, memory_of, predict, split_of
from torchtitan.foresight.profile import Checkpointing, Profile, Split, profile, with_vocabulary
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

_LEAST_TOKENS = 4096
"""Tokens of a window that context parallelism leaves to each rank: below, it communicates more and saves little."""

_REFERENCE_BATCH = 4
"""Windows of the micro-batch in the profiles, from which other sizes are scaled."""

_MOST_SEQUENCES = 32
"""Windows of a rank's micro-batch."""

_MOST_STAGES = 16
_SHORT = 1024
"""Windows beyond this can be shortened."""
_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")


LAYOUT = (
    *("data_parallel_replicate_degree", "data_parallel_shard_degree", "context_parallel_degree"),
    *("tensor_parallel_degree", "pipeline_parallel_degree", "expert_parallel_degree"),
    *("pipeline_parallel_microbatch_size", "pipeline_parallel_schedule"),
)
"""Options of `parallelism` that a plan chooses."""


@dataclass(frozen=True)
class Option:
    """A valid layout with its prediction."""

    config: Trainer.Config
    dims: ParallelDims
    prediction: Prediction

    @property
    def words(self) -> list[str]:
        """Options of the command line that select this layout."""
        default, chosen = ParallelismConfig(), self.config.parallelism
        names = [name for name in LAYOUT if getattr(chosen, name) != getattr(default, name)]
        training = {"local_batch_size": self.config.training.local_batch_size}
        if (whole := self.config.training.global_batch_size) != -1:
            training["global_batch_size"] = whole
        values = {f"--parallelism.{name}": getattr(chosen, name) for name in names}
        values |= {f"--training.{name}": value for name, value in training.items()}
        values["--activation_checkpoint.mode"] = self.config.activation_checkpoint.mode
        return [str(word) for pair in values.items() for word in pair]

    @property
    def name(self) -> str:
        return _name(self.config, self.dims)

    @property
    def kind(self) -> tuple[object, ...]:
        """Layouts of one kind differ only in the size of their batches and the schedule."""
        return (self.dims, self.config.activation_checkpoint.mode)


def _name(config: Trainer.Config, dims: ParallelDims) -> str:
    """Return a few words, such as `dp_shard 32 x tp 8, local batch 16, checkpointing full`."""
    experts = f" (ep {dims.ep})" if dims.ep > 1 else ""
    schedule = f" ({config.parallelism.pipeline_parallel_schedule})" if dims.pp > 1 else ""
    mode = config.activation_checkpoint.mode
    return f"{dims}{experts}{schedule}, local batch {config.training.local_batch_size}, checkpointing {mode}"


@dataclass(frozen=True)
class Plan:
    """The best layouts, best first, and how many were compared."""

    options: list[Option]
    device: Device
    world_size: int
    n_compared: int
    n_too_large: int

    def reason(self, index: int) -> str:
        """Say why a layout is slower than the first: the parts of the step that take more time per token."""
        best, other = (self.options[i].prediction for i in (0, index))
        slowdown = best.tokens_per_second / other.tokens_per_second - 1
        differences = {
            name: _per_token(other, name) - _per_token(best, name) for name in {**best.time.parts, **other.time.parts}
        }
        total = 1 / best.tokens_per_second
        worst = sorted(differences, key=lambda name: -differences[name])[:2]
        causes = [f"{name} +{differences[name] / total:.1%}" for name in worst if differences[name] > 0.001 * total]
        return f"{slowdown:.1%} slower" + (f": {', '.join(causes)}" if causes else "")


def _per_token(prediction: Prediction, part: str) -> float:
    return prediction.time.parts.get(part, 0.0) / (prediction.tokens_per_second * prediction.seconds)


def plan(
    config: Trainer.Config,
    world_size: int,
    device: Device | str = "h100",
    *,
    devices_per_host: int = 8,
    best: int = 5,
) -> Plan:
    """Compare the layouts of a run, and return the best.

    The configuration's model, data types, compilation and converters are kept; the degrees of parallelism, the schedule
    of a pipeline, local batch and activation checkpointing are chosen. A global batch in the configuration is kept.

    Args:
        config: the run's configuration.
        world_size: devices of the run.
        device: a device, or its name in `DEVICES`.
        devices_per_host: devices that are connected by fast links.
        best: most layouts to return, of different degrees or checkpointing.

    Raises:
        UserError: if no layout fits into memory, none is valid, or the devices do not fill several hosts.
    """
    if world_size > devices_per_host and world_size % devices_per_host:
        raise UserError(f"{world_size} devices do not fill hosts of {devices_per_host} (--devices_per_host)")
    config = with_vocabulary(config)
    device = device_named(device, world_size) if isinstance(device, str) else device
    measure = functools.cache(functools.partial(profile, config))
    candidates = list(_valid_candidates(config, world_size, device, devices_per_host, measure))
    if not candidates:
        raise UserError(
            f"no layout of {world_size} devices is valid for {config.model_spec.name} {config.model_spec.flavor} with "
            f"--seq_len {config.training.seq_len} and --global_batch_size {config.training.global_batch_size}: another "
            "number of devices, a power of 2, or a multiple of it as the global batch may be"
        )
    limit = USABLE * device.memory_gib * GIB
    fitting = [Option(one.config, one.dims, one.predict()) for one in candidates if one.memory_bytes <= limit]
    fitting.sort(key=lambda option: (-option.prediction.tokens_per_second, option.prediction.memory_bytes))
    chosen: dict[tuple[object, ...], Option] = {}
    for option in fitting:
        if len(chosen) == best:
            break
        if option.kind not in chosen:
            # Profiled again with its own batch, since the scaled one is less accurate.
            exact = predict(option.config, world_size, device, devices_per_host=devices_per_host)
            if exact.memory_bytes <= limit:
                chosen[option.kind] = dataclasses.replace(option, prediction=exact)
    if not chosen:
        raise UserError(_nothing_fits(config, candidates, world_size, device, devices_per_host, measure))
    ranked = sorted(chosen.values(), key=lambda option: -option.prediction.tokens_per_second)
    return Plan(ranked, device, world_size, len(candidates), len(candidates) - len(fitting))


class _Candidate(NamedTuple):
    """A valid layout, its memory, and the function that predicts it."""

    config: Trainer.Config
    dims: ParallelDims
    memory_bytes: float
    predict: Callable[[], Prediction]


_Measure = Callable[[Split], Profile]


def _valid_candidates(
    config: Trainer.Config, world_size: int, device: Device, devices_per_host: int, measure: _Measure
) -> Iterator[_Candidate]:
    for candidate in _candidates(config, world_size, devices_per_host):
        try:
            dims = layout_of(candidate, world_size, compiles=True)
        except UserError:
            continue
        split = split_of(candidate, dims)
        # DDP wraps layers like FSDP, but gathers nothing.
        measured = measure(split._replace(sequences=_REFERENCE_BATCH, data_parallel="FSDP"))
        batch = split.sequences / _REFERENCE_BATCH
        predict_it = functools.partial(compose, candidate, dims, device, measured, devices_per_host, batch=batch)
        yield _Candidate(candidate, dims, memory_of(candidate, dims, measured, batch=batch), predict_it)


def _nothing_fits(
    config: Trainer.Config,
    candidates: Sequence[_Candidate],
    world_size: int,
    device: Device,
    devices_per_host: int,
    measure: _Measure,
) -> str:
    nearest = min(candidates, key=lambda one: one.memory_bytes)
    limit = USABLE * device.memory_gib * GIB
    remedies = []
    for factor in (2, 4, 8, 16, 32, 64):
        larger = _valid_candidates(config, factor * world_size, device, devices_per_host, measure)
        if any(one.memory_bytes <= limit for one in larger):
            remedies.append(f"{factor * world_size} devices")
            break
    if config.training.seq_len > _SHORT:
        remedies.append("a smaller --training.seq_len")
    if not config.compile.enable:
        remedies.append("--compile.enable")
    return (
        f"no layout fits into the {limit / GIB:.1f} GiB that {device.name} offers: the nearest of {len(candidates)} is "
        f"{_name(nearest.config, nearest.dims)}, with {nearest.memory_bytes / GIB:.1f} GiB. What may make it fit: "
        f"{', '.join(remedies) or 'a smaller model'}"
    )


def _candidates(config: Trainer.Config, world_size: int, devices_per_host: int) -> Iterator[Trainer.Config]:
    """Yield configurations, which may be invalid."""
    experts = next(iter(config.model_spec.model.expert_parallel_sizes.values()), 1)
    for tp in _powers(min(world_size, devices_per_host)):
        for cp in _powers(max(1, config.training.seq_len // _LEAST_TOKENS)):
            for pp in _powers(_MOST_STAGES):
                dp, rest = divmod(world_size, tp * cp * pp)
                if rest:
                    continue
                for shard in _shards(dp, tp * cp, devices_per_host):
                    for ep in _powers(min(experts, shard * cp * tp)):
                        degrees: dict[str, Any] = {
                            "data_parallel_replicate_degree": dp // shard,
                            "data_parallel_shard_degree": shard,
                            "context_parallel_degree": cp,
                            "tensor_parallel_degree": tp,
                            "pipeline_parallel_degree": pp,
                            "expert_parallel_degree": ep,
                            "expert_tensor_parallel_degree": 1,
                            "enable_async_tensor_parallel": config.parallelism.enable_async_tensor_parallel and tp > 1,
                        }
                        yield from _batches(config, degrees, dp)


def _shards(dp: int, inner: int, devices_per_host: int) -> list[int]:
    """Return degrees of sharding: all ranks (FSDP), the ranks of a host (HSDP), one (DDP)."""
    in_host = max(1, devices_per_host // inner)
    return sorted({dp, 1} | ({in_host} if dp % in_host == 0 and in_host < dp else set()))


def _batches(config: Trainer.Config, degrees: dict[str, Any], dp: int) -> Iterator[Trainer.Config]:
    whole = config.training.global_batch_size
    pp = degrees["pipeline_parallel_degree"]
    sizes = _powers(_MOST_SEQUENCES) if pp == 1 else [pp * n for n in (1, 2, 4, 8)]
    for size in sizes:
        if whole != -1 and whole % (size * dp):
            continue
        for schedule in ("1F1B", "Interleaved1F1B") if pp > 1 else (config.parallelism.pipeline_parallel_schedule,):
            for mode in _CHECKPOINTING:
                yield dataclasses.replace(
                    config,
                    parallelism=dataclasses.replace(
                        config.parallelism,
                        **degrees,
                        pipeline_parallel_schedule=schedule,
                        pipeline_parallel_microbatch_size=1,
                    ),
                    training=dataclasses.replace(config.training, local_batch_size=size),
                    activation_checkpoint=dataclasses.replace(config.activation_checkpoint, mode=mode),
                )


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length())]


def command(words: Sequence[str], option: Option, devices_per_host: int) -> str:
    """Return the command that trains with a layout; `words` are the options that selected the configuration."""
    world_size = option.dims.world_size
    hosts = -(-world_size // devices_per_host)
    variables = f"NNODES={hosts} NGPU={devices_per_host}" if hosts > 1 else f"NGPU={world_size}"
    return f"{variables} torchtitan train {shlex.join([*words, *option.words])}"

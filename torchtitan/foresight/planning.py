"""Finds the best layouts of a run: enumerates them, prunes by memory, ranks by predicted speed."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from operator import attrgetter

from torchtitan.config.configurable import leaves
from torchtitan.config.sections import PipelineSchedule
from torchtitan.distributed.compile import check_compile
from torchtitan.distributed.parallel_dims import DEGREES
from torchtitan.dry_run.fake_trainer import with_vocabulary
from torchtitan.dry_run.fitting import USABLE, with_mode
from torchtitan.foresight.devices import Device, device_named
from torchtitan.foresight.narrow_work import check_kernels
from torchtitan.foresight.prediction import Estimate, Layout, Prediction
from torchtitan.foresight.profile import find_facts, profile
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

_LEAST_TOKENS = 4096
"""Tokens of a window that context parallelism leaves to each rank: below, it communicates more and
saves little."""

_REFERENCE_BATCH = 4
"""Windows of the micro-batch in the profiles; other sizes are scaled from it."""

_MOST_SEQUENCES = 32
"""Windows of a rank's micro-batch."""

_MOST_STAGES = 16
_SHORT = 1024
"""Windows beyond this can be shortened."""

MESH = tuple(f"parallelism.{name}" for name in DEGREES)
"""Options of the degrees that multiply to the number of processes."""

CHOSEN = (
    *MESH,
    *("parallelism.expert_parallel_degree", "parallelism.expert_tensor_parallel_degree"),
    *("parallelism.pipeline_parallel_microbatch_size", "parallelism.pipeline_parallel_schedule"),
    *("parallelism.enable_async_tensor_parallel", "activation_checkpoint.mode"),
    *("training.local_batch_size", "training.global_batch_size"),
)
"""Options that a plan may change."""


def option_words(config: Trainer.Config, planned: Mapping[str, object]) -> list[str]:
    """Return the command-line options that give a configuration the layout in the dictionary
    `planned`."""
    values = leaves(planned)
    return [
        f"--{name}={values[name]}" for name in CHOSEN if attrgetter(name)(config) != values[name]
    ]


@dataclass(frozen=True)
class Plan:
    """The best layouts, best first, and how many were compared."""

    options: list[Prediction]
    n_compared: int
    n_too_large: int

    def reason(self, index: int) -> str:
        """Explain why a layout is slower than the first: name the parts of the step that take more
        time per token."""
        best, other = self.options[0], self.options[index]
        slowdown = best.tokens_per_second / other.tokens_per_second
        more = {  # relative to the best layout's time per token
            name: slowdown * other.parts.get(name, 0.0) / other.seconds
            - best.parts.get(name, 0.0) / best.seconds
            for name in {**best.parts, **other.parts}
        }
        worst = sorted(more, key=lambda name: -more[name])[:2]
        causes = [f"{name} +{more[name]:.1%}" for name in worst if more[name] > 0.001]
        return f"{slowdown - 1:.1%} slower" + (f": {', '.join(causes)}" if causes else "")


def plan(
    config: Trainer.Config,
    world_size: int,
    device: Device | str = "h100",
    *,
    devices_per_host: int | None = None,
    best: int = 5,
) -> Plan:
    """Compare the layouts of a run, and return the best.

    The configuration's model, data types, compilation and converters are kept; the degrees of
    parallelism, the schedule of a pipeline, local batch and activation checkpointing are chosen. A
    global batch in the configuration is kept.

    Args:
        config: the run's configuration.
        world_size: devices of the run.
        device: a device, or its name in `DEVICES`.
        devices_per_host: devices that are connected by fast links; None: the device's.
        best: most layouts to return, of different degrees or checkpointing.

    Raises:
        UserError: for an invalid configuration, devices that do not fill hosts, or if no layout is
            valid and fits.
    """
    device = device_named(device, world_size)
    devices_per_host = devices_per_host or device.devices_per_host
    if world_size > devices_per_host and world_size % devices_per_host:
        raise UserError(
            f"{world_size} devices do not fill hosts of {devices_per_host} (--devices_per_host)"
        )
    for section in (config, config.training, config.parallelism, config.activation_checkpoint):
        section.validate()
    check_compile(config.compile)  # also no mistake of the layouts
    config = with_vocabulary(config)
    check_kernels(config, device)
    measure = functools.cache(functools.partial(profile, config, find_facts(config)))

    def estimate(layout: Layout) -> Estimate:
        """Estimate a layout from a profile that it shares with others."""
        # DDP wraps layers like FSDP, but gathers nothing.
        return Estimate(
            layout, measure(layout.split._replace(sequences=_REFERENCE_BATCH, data_parallel="FSDP"))
        )

    estimates = [estimate(layout) for layout in layouts(config, world_size, devices_per_host)]
    if not estimates:
        Layout.of(config, world_size)  # says why, if the given layout is not valid either
        raise UserError(
            f"no layout of {world_size} devices is valid for {config.model_spec.name} "
            f"{config.model_spec.flavor} with --seq_len {config.training.seq_len} and "
            f"--global_batch_size {config.training.global_batch_size}; try another number of "
            "devices, such as a power of 2, or a global batch that is a multiple of it"
        )
    limit = USABLE * device.memory_gib
    fitting = [
        one.predict(device, devices_per_host) for one in estimates if one.memory_gib <= limit
    ]
    fitting.sort(key=lambda one: (-one.tokens_per_second, one.memory_gib))
    nearest = min(estimates, key=lambda one: one.memory_gib)
    chosen: dict[tuple[object, ...], Prediction] = {}
    for layout in [*(one.layout for one in fitting), nearest.layout]:
        # Layouts of one kind differ only in the size of their batches and the schedule.
        kind = (layout.dims, layout.config.activation_checkpoint.mode)
        if len(chosen) == best or kind in chosen:
            continue
        # Profiled again with its own batch, since the scaled one is less accurate.
        exact = Estimate(layout, measure(layout.split)).predict(device, devices_per_host)
        if exact.memory_gib <= limit:
            chosen[kind] = exact
    if not chosen:
        least = functools.partial(layouts, config, devices_per_host=devices_per_host, least=True)
        sizes = (factor * world_size for factor in (2, 4, 8, 16, 32, 64))
        enough = (n for n in sizes if any(estimate(one).memory_gib <= limit for one in least(n)))
        raise _nothing_fits(exact, len(estimates), n_enough=next(enough, None))
    ranked = sorted(chosen.values(), key=lambda one: -one.tokens_per_second)
    return Plan(ranked, len(estimates), len(estimates) - len(fitting))


def _nothing_fits(nearest: Prediction, n_compared: int, n_enough: int | None) -> UserError:
    device, config = nearest.device, nearest.layout.config
    remedies = {
        f"{n_enough} devices": n_enough is not None,
        "a smaller --training.seq_len": config.training.seq_len > _SHORT,
        "--compile.enable": not config.compile.enable,
    }
    return UserError(
        f"no layout fits into the {USABLE * device.memory_gib:.1f} GiB that {device.name} offers: "
        f"the nearest of {n_compared} is {nearest.layout}, with {nearest.memory_gib:.1f} GiB. What "
        "may make it fit: "
        f"{', '.join(name for name, helps in remedies.items() if helps) or 'a smaller model'}"
    )


def layouts(
    config: Trainer.Config, world_size: int, devices_per_host: int, *, least: bool = False
) -> Iterator[Layout]:
    """Yield the valid layouts of a run; with `least`, only those that need the least memory of
    their degrees."""
    is_async = config.parallelism.enable_async_tensor_parallel
    n_experts = next(iter(config.model_spec.model.expert_parallel_sizes.values()), 1)
    most = (
        min(world_size, devices_per_host),
        max(1, config.training.seq_len // _LEAST_TOKENS),
        _MOST_STAGES,
    )
    modes = ("full",) if least else ("none", "selective", "full")
    for tp, cp, pp in product(*map(_powers, most)):
        dp, rest = divmod(world_size, tp * cp * pp)
        if rest:
            continue
        sizes = _powers(_MOST_SEQUENCES) if pp == 1 else [pp * n for n in (1, 2, 4, 8)]
        sizes = sizes[:1] if least else sizes
        schedules: tuple[PipelineSchedule, ...]
        schedules = (
            ("1F1B", "Interleaved1F1B")
            if pp > 1
            else (config.parallelism.pipeline_parallel_schedule,)
        )
        in_host = max(1, devices_per_host // (tp * cp))
        # All ranks (FSDP), the ranks of a host (HSDP), or none (DDP).
        for shard in sorted({dp, 1} | ({in_host} if dp % in_host == 0 and in_host < dp else set())):
            experts = _powers(min(n_experts, shard * cp * tp))
            for ep, size, schedule, mode in product(experts, sizes, schedules, modes):
                parallelism = dataclasses.replace(
                    config.parallelism,
                    data_parallel_replicate_degree=dp // shard,
                    data_parallel_shard_degree=shard,
                    context_parallel_degree=cp,
                    tensor_parallel_degree=tp,
                    enable_async_tensor_parallel=is_async and tp > 1,
                    pipeline_parallel_degree=pp,
                    pipeline_parallel_schedule=schedule,
                    pipeline_parallel_microbatch_size=1,
                    expert_parallel_degree=ep,
                    expert_tensor_parallel_degree=1,
                )
                training = dataclasses.replace(config.training, local_batch_size=size)
                candidate = dataclasses.replace(
                    with_mode(config, mode), parallelism=parallelism, training=training
                )
                # the degrees do not fit the model or each other
                with contextlib.suppress(UserError):
                    yield Layout.of(candidate, world_size, compiles=True)


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length())]

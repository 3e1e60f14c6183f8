"""The largest batch and the longest window of a layout that fit into a device."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

from torchtitan.dry_run.fitting import USABLE, with_mode
from torchtitan.foresight.devices import Device
from torchtitan.foresight.prediction import Estimate, Layout
from torchtitan.foresight.profile import Facts, find_facts, profile
from torchtitan.tools.errors import UserError

_UNIT = 256
"""Windows are multiples of this number of tokens."""

MOST_SEQUENCES = 1024
"""A larger local batch is not looked for."""


@dataclass(frozen=True)
class Capacity:
    """The largest sizes that fit with a mode of activation checkpointing; 0: not even the
    smallest."""

    mode: str
    sequences: int
    """Windows of the configured length in the largest local batch, at most `MOST_SEQUENCES`."""
    window: int
    """Tokens of the longest window in a local batch of 1, at most the model's context."""


def capacities(layout: Layout, device: Device) -> list[Capacity]:
    """Return what fits into each device of a layout, without and with activation checkpointing. The
    degrees of parallelism stay. Raise `UserError` under pipeline parallelism, whose memory depends
    on the schedule and on micro-batches."""
    if layout.dims.pp > 1:
        raise UserError("the largest batch under pipeline parallelism is not predicted")
    facts = find_facts(layout.config)
    return [_capacity(layout, device, facts, mode) for mode in ("none", "selective", "full")]


def _capacity(layout: Layout, device: Device, facts: Facts, mode: str) -> Capacity:
    config = with_mode(layout.config, mode)
    limit = USABLE * device.memory_gib
    context: int = config.model_spec.model.max_seq_len
    unit = min(_UNIT, context)

    @functools.cache
    def memory_gib(sequences: int, window: int) -> float:
        training = dataclasses.replace(
            config.training, local_batch_size=sequences, seq_len=window, global_batch_size=-1
        )
        candidate = dataclasses.replace(config, training=training)
        sized = Layout.of(candidate, layout.dims.world_size, compiles=True)
        return Estimate(sized, profile(candidate, facts, sized.split)).memory_gib

    seq_len = config.training.seq_lens[-1]
    sequences = _largest(lambda n: memory_gib(n, seq_len), limit, MOST_SEQUENCES)
    units = _largest(lambda n: memory_gib(1, n * unit), limit, context // unit)
    return Capacity(mode, sequences, units * unit)


def _largest(memory_gib: Callable[[int], float], limit: float, most: int) -> int:
    """Return the largest number from 1 to `most` whose memory is within the limit; 0 if none is.
    Memory grows nearly linearly, so lines through measured numbers find it in a few steps. Numbers
    far above it are not measured, since dry runs of these take long."""
    if memory_gib(1) > limit:
        return 0
    fits = 1
    exceeds: int | None = None
    step = 1  # from the largest number that fits
    while fits < most:
        guess = min(fits + step, most if exceeds is None else exceeds - 1)
        if guess == fits:
            return fits
        slope = (memory_gib(guess) - memory_gib(fits)) / (guess - fits)
        if memory_gib(guess) <= limit:
            fits = guess
        else:
            exceeds = guess
        left = limit - memory_gib(fits)
        step = max(1, int(left / slope)) if slope > 0 else 2 * fits
        if exceeds is not None and step >= exceeds - fits:
            step = (exceeds - fits) // 2
    return fits

"""Ranges of options of components, known without importing the components, which need torch."""

from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from torchtitan.tools.errors import require


class Range(NamedTuple):
    """The values that an option may have; None is always among them."""

    holds: Callable[[float], bool]
    text: str
    """Completes "must be …"."""


def _at_least(minimum: int, unit: str = "") -> Range:
    return Range(lambda value: value >= minimum, f"at least {minimum}{unit}")


_RATE = Range(lambda value: 0 <= value < inf, "a number of at least 0")
_DECAY = Range(lambda value: 0 <= value < 1, "in [0, 1)")
_PART = Range(lambda value: 0 <= value <= 1, "in [0, 1]")
_ABOVE_0 = Range(lambda value: 0 < value < inf, "above 0")

RANGES: Mapping[str, Mapping[str, Range]] = {
    "optimizer": {
        "lr": _RATE,
        "weight_decay": _RATE,
        "beta1": _DECAY,
        "beta2": _DECAY,
        "momentum": _DECAY,
        # With 0, rows of tokens absent from the batch would be updated by 0 / 0.
        "eps": _ABOVE_0,
        "rank_fraction": Range(lambda value: 0 < value <= 1, "above 0, at most 1"),
        "basis_interval": _at_least(1),
    },
    "lr_scheduler": {
        "warmup_steps": _at_least(0),
        "total_steps": _at_least(1),
        "decay_power": _ABOVE_0,
        "warmup_ratio": _PART,
        "decay_ratio": _PART,
        "min_lr_factor": _PART,
    },
    "spikes": {
        "threshold": Range(lambda value: value > 0, "above 0, or None (off)"),
        "window": _at_least(2),
        "max_in_a_row": _at_least(1),
    },
    "ema": {"decay": Range(lambda value: 0 <= value < 1, "from 0 to below 1, or None (off)")},
    "loss_scale": {
        "initial": Range(lambda value: 0 < value < inf, "a finite number above 0"),
        "growth": Range(lambda value: 1 < value < inf, "a finite number above 1"),
        "backoff": Range(lambda value: 0 < value < 1, "between 0 and 1"),
        "interval": _at_least(1),
    },
    "checkpoint": {
        "interval": _at_least(1, " step"),
        "keep_latest_k": _at_least(0, " (keep all)"),
        "load_step": Range(lambda value: value >= -1, "a step, or -1 (the newest)"),
    },
    "metrics": {"log_freq": _at_least(1)},
    "validator": {
        "freq": _at_least(1),
        "steps": Range(lambda value: value == -1 or value >= 1, "at least 1, or -1 for all data"),
    },
    "profiling": {
        "profile_freq": _at_least(1),
        "profiler_active": _at_least(1),
        "profiler_warmup": _at_least(0),
    },
}
"""Section → option → its range."""


def check_range(section: str, option: str, value: float | None) -> None:
    """Raise `UserError` for a value outside its range."""
    allowed = RANGES[section][option]
    require(value is None or allowed.holds(value), f"--{section}.{option}", value, allowed.text)


def check_ranges(section: str, values: object) -> None:
    """Raise `UserError` for the first attribute of `values`, a section's configuration, that is
    outside its range."""
    for option in RANGES[section]:
        check_range(section, option, getattr(values, option))

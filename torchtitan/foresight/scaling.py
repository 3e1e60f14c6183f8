"""Rules that turn a number of layers into a run: sizes, batch, rate, weight decay and length.

`RULES` names each rule and its source. The functions compute them from plain numbers, without
torch.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple


class Rule(NamedTuple):
    """A quantity of a run, the option that overrides it, and where its value comes from."""

    quantity: str
    option: str
    rule: str
    source: str


_OURS = "this project"

RULES = (
    Rule("layers", "--dial", "the dial, or the most that the budget allows", _OURS),
    Rule("width", "--model.dim", "64 per layer (--width_per_layer)", "nanochat"),
    Rule(
        "heads",
        "--model.n_heads",
        "width / 64, so that heads keep their width",
        "muP, arXiv:2203.03466; 64: this project",
    ),
    Rule("feed-forward width", "--model.ffn_dim", "the ratio of the family's debugmodel", _OURS),
    Rule("window", "--window", "256 below a width of 512, else 2048", _OURS),
    Rule(
        "tokens",
        "--training.steps",
        "20 per parameter that multiplies every token (--tokens_per_parameter)",
        "20: Chinchilla, arXiv:2203.15556; the head counts: arXiv:2406.19146",
    ),
    Rule(
        "batch",
        "--training.global_batch_size",
        "0.58 x tokens^0.571 tokens, rounded to equal numbers of windows per device",
        "both numbers: Step Law, arXiv:2503.04715; rounding: this project",
    ),
    Rule(
        "learning rate",
        "--optimizer.lr",
        "8e-3 at width 128 and 2 layers, 1.6e-2 with --muon, transferred to every size",
        "transfer: muP, arXiv:2203.03466, CompleteP, arXiv:2505.01618, and for --muon the spectral "
        "condition, arXiv:2310.17813; both rates: measured, docs/scaling.md",
    ),
    Rule(
        "weight decay",
        "--optimizer.weight_decay",
        "1 / (rate x steps x min(1, T)), T = 1.084 x (tokens per parameter)^-0.527",
        "both numbers: Power Lines, arXiv:2505.13738; min(1, T): this project",
    ),
    Rule(
        "warm-up",
        "--lr_scheduler.warmup_steps",
        "a token per parameter, at most a tenth of the run",
        "token per parameter: arXiv:2406.19146; tenth: CompleteP, arXiv:2505.01618",
    ),
    Rule("decay", "--lr_scheduler.decay_ratio", "linear to zero", "arXiv:2502.15938"),
)
"""The quantities that follow from a dial, in the order of their computation."""

BASE_LAYERS, BASE_WIDTH = 2, 128
"""Size with the rate of the configuration and the initial values of the family."""

BASE_RATE = 8e-3
"""Peak learning rate of AdamW at the base size (measured, docs/scaling.md)."""

MUON_BASE_RATE = 1.6e-2
"""Peak learning rate of Muon, whose updates are scaled to AdamW's, and of AdamW next to it."""

TOKENS_PER_PARAMETER = 20.0
WIDTH_PER_LAYER = 64
MOST_LAYERS = 256
_MOST_HEAD_WIDTH = 64
_SHORT = 256
_LONG = 2048
_NARROW = 512
"""Tokens of a window in models below the width `_NARROW`, and in others."""

_LOCAL_TOKENS = 16_384
"""Tokens of a local batch, at most."""

UTILIZATION = 0.4
"""Part of a device's peak that a run reaches, for `--hours`: 0.38 to 0.43 for Llama 3 405B
(arXiv:2407.21783, table 4)."""


class Sizes(NamedTuple):
    """Sizes of a model that the dial sets."""

    layers: int
    width: int
    heads: int
    head_width: int


def sizes(layers: int, width_per_layer: int = WIDTH_PER_LAYER) -> Sizes:
    """Return the sizes of a dial. Heads are 64 wide, or as wide as a layer adds if that is less."""
    head_width = min(_MOST_HEAD_WIDTH, width_per_layer)
    heads = layers * width_per_layer // head_width
    return Sizes(layers, heads * head_width, heads, head_width)


def base_sizes(layers: int, width_per_layer: int = WIDTH_PER_LAYER) -> Sizes:
    """Return the base width with another number of layers, and heads as wide as a dial's."""
    head_width = sizes(1, width_per_layer).head_width
    heads = max(1, BASE_WIDTH // head_width)
    return Sizes(layers, heads * head_width, heads, head_width)


def window(width: int) -> int:
    """Return the tokens of a window."""
    return _SHORT if width < _NARROW else _LONG


def batch_tokens(tokens: float) -> float:
    """Return the tokens of a global batch before it is rounded to windows (Step Law,
    arXiv:2503.04715). `tokens`: length of the run."""
    return 0.58 * tokens**0.571


@dataclass(frozen=True)
class Schedule:
    """Batch, length, rate and weight decay of a run."""

    windows: int
    local_windows: int
    steps: int
    rate: float
    weight_decay: float
    warmup_steps: int


def schedule(
    parameters: float, tokens: float, seq_len: int, devices: int = 1, *, muon: bool = False
) -> Schedule:
    """Return the schedule of a run.

    Args:
        parameters: parameters that multiply every token, with the output head.
        tokens: length of the run; it is rounded up to whole steps.
        seq_len: tokens of a window.
        devices: data-parallel ranks, which share the windows of a step equally. Each has at least
            one window, and whole local batches if it has several: on many devices, a step may have
            several times the tokens of `batch_tokens`.
        muon: Muon updates the matrices inside layers.
    """
    local, most = batch_tokens(tokens) / seq_len / devices, max(1, _LOCAL_TOKENS // seq_len)
    per_device = max(1, round(local) if local <= most else most * round(local / most))
    windows = per_device * devices
    steps = max(1, math.ceil(tokens / (windows * seq_len)))
    horizon = min(1.0, 1.084 * (tokens / parameters) ** -0.527)
    warmup = min(parameters / (windows * seq_len), 0.1 * steps)
    rate = MUON_BASE_RATE if muon else BASE_RATE
    return Schedule(
        windows=windows,
        local_windows=min(per_device, most),
        steps=steps,
        rate=rate,
        weight_decay=1 / (rate * steps * horizon),
        warmup_steps=max(1, round(warmup)),
    )

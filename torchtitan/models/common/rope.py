"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), with its scalings for long
contexts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan.config.configurable import Section
from torchtitan.tools.errors import require

Scaling = Literal[
    "llama3", "linear", "dynamic", "yarn", "yarn_untruncated", "longrope", "proportional"
]


@dataclass(kw_only=True, slots=True)
class RoPEConfig(Section):
    """Rotary position embedding."""

    theta: float = 500_000.0
    """Base of the geometric series of wavelengths."""

    rotated_fraction: float = 1.0
    """Part of each head that is rotated, from its first element (`proportional`: of both halves;
    latent attention: the last elements); other elements have no position."""

    scaling: Scaling = "llama3"
    """Change of frequencies for long contexts; see the function of each one in
    models/common/rope.py."""

    scaling_factor: float = 1.0
    """Ratio of the context to the original one; divides the frequencies. 1: unscaled, except with
    `longrope` and `proportional`."""

    low_freq_factor: float = 1.0
    """Pairs with fewer turns than this in the original context are scaled in full (`llama3`;
    `yarn`: beta_slow)."""

    high_freq_factor: float = 4.0
    """Pairs with more turns than this in the original context are not scaled (`llama3`; `yarn`:
    beta_fast)."""

    original_max_seq_len: int = 8192
    """Context in tokens that the model was trained with before scaling."""

    attention_factor: float | None = None
    """Factor of queries and keys (`yarn`, `longrope`). None: the published function of
    scaling_factor."""

    short_factors: list[float] | None = None
    """Divisor of each pair's frequency in documents up to original_max_seq_len (`longrope`)."""

    long_factors: list[float] | None = None
    """Divisor of each pair's frequency in longer documents (`longrope`)."""

    def rotated_dim(self, head_dim: int) -> int:
        """Return how many of a head's first elements form pairs with a frequency."""
        return (
            head_dim
            if self.scaling == "proportional"
            else int(head_dim * self.rotated_fraction + 1e-6)
        )

    @property
    def is_scaled(self) -> bool:
        """True if `scaling` has an effect."""
        return self.scaling_factor != 1.0 or self.scaling in ("longrope", "proportional")

    @property
    def depends_on_length(self) -> bool:
        """True if frequencies depend on the length of the document."""
        return self.is_scaled and self.scaling in ("longrope", "dynamic")

    def validate(self, head_dim: int) -> None:
        """Raise `UserError` for values that heads of this width cannot use."""
        for name in (
            "theta",
            "scaling_factor",
            "low_freq_factor",
            "high_freq_factor",
            "attention_factor",
        ):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, f"--model.rope.{name}", value, "above 0")
        low, high = self.low_freq_factor, self.high_freq_factor
        require(
            low <= high, "--model.rope.high_freq_factor", high, f"at least low_freq_factor {low}"
        )
        length = self.original_max_seq_len
        require(
            1 <= length <= 2**32, "--model.rope.original_max_seq_len", length, f"from 1 to {2**32}"
        )
        rotated = self.rotated_dim(head_dim)
        fits = 0 < self.rotated_fraction <= 1 and rotated >= 2 and rotated % 2 == 0
        must = (
            f"such that an even number from 2 to the head width {head_dim} is rotated, not "
            f"{rotated}"
        )
        require(fits, "--model.rope.rotated_fraction", self.rotated_fraction, must)
        if self.scaling == "longrope":
            for name in ("short_factors", "long_factors"):
                factors = getattr(self, name) or []
                fits = len(factors) == rotated // 2 and all(
                    0 < factor < math.inf for factor in factors
                )
                must = f"{rotated // 2} numbers above 0, one for each rotated pair"
                require(fits, f"--model.rope.{name}", f"{len(factors)} numbers", must)


Frequencies = Callable[[RoPEConfig, Tensor, Any], Tensor]
"""(configuration, unscaled frequencies (R / 2,), lengths of documents (B, L, 1, 1) or None) →
frequencies."""


def _linear(config: RoPEConfig, frequencies: Tensor, lengths: Tensor) -> Tensor:
    """Position interpolation: divide all frequencies (Chen et al. 2023, arXiv:2306.15595)."""
    return frequencies / config.scaling_factor


def _llama3(config: RoPEConfig, frequencies: Tensor, lengths: Tensor) -> Tensor:
    """Divide low frequencies, keep high ones, and interpolate in 1 / wavelength in between (Llama
    3.1)."""
    # Turns of a pair within the original context: many for high frequencies, few for low ones.
    turns = config.original_max_seq_len * frequencies / (2 * math.pi)
    kept = (turns - config.low_freq_factor) / max(
        config.high_freq_factor - config.low_freq_factor, 1e-9
    )
    kept = kept.clamp(0, 1)
    return (1 - kept) * frequencies / config.scaling_factor + kept * frequencies


def _yarn(config: RoPEConfig, frequencies: Tensor, lengths: Tensor) -> Tensor:
    """Divide low frequencies, keep high ones, and interpolate in the number of the pair in between
    (YaRN, Peng et al. 2023, arXiv:2309.00071, 3.2). `yarn_untruncated`: its bounds are not rounded
    to whole pairs (gpt-oss)."""
    n_pairs = len(frequencies)

    def pair_with(turns: float) -> float:
        return (
            n_pairs
            * math.log(config.original_max_seq_len / (turns * 2 * math.pi))
            / math.log(config.theta)
        )

    floor, ceil = (math.floor, math.ceil) if config.scaling == "yarn" else (float, float)
    first = max(floor(pair_with(config.high_freq_factor)), 0)
    last = min(ceil(pair_with(config.low_freq_factor)), 2 * n_pairs - 1)
    pairs = torch.arange(n_pairs, dtype=torch.float32, device=frequencies.device)
    scaled = ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    return scaled * frequencies / config.scaling_factor + (1 - scaled) * frequencies


def _dynamic(config: RoPEConfig, frequencies: Tensor, lengths: Tensor) -> Tensor:
    """Raise the base with the length of a document beyond the original context (NTK-aware; YaRN,
    3.4)."""
    n_pairs, factor = len(frequencies), config.scaling_factor
    stretch = (factor * lengths / config.original_max_seq_len).clamp(min=factor) - (factor - 1)
    # The base is multiplied by stretch ** (d / (d - 2)), and pair i has the base's power -2 i / d.
    pairs = torch.arange(n_pairs, dtype=torch.float32, device=frequencies.device)
    return frequencies * stretch ** (-pairs / max(n_pairs - 1, 1))


def _longrope(config: RoPEConfig, frequencies: Tensor, lengths: Tensor) -> Tensor:
    """Divide each frequency by its own factor, in long documents another (LongRoPE,
    arXiv:2402.13753)."""
    short, long = (
        torch.tensor(f, device=frequencies.device)
        for f in (config.short_factors, config.long_factors)
    )
    return torch.where(
        lengths > config.original_max_seq_len, frequencies / long, frequencies / short
    )


def _proportional(config: RoPEConfig, frequencies: Tensor, lengths: Tensor) -> Tensor:
    """Divide all frequencies, and rotate only the fastest pairs of a head (Gemma 4)."""
    n_rotated = int(len(frequencies) * config.rotated_fraction)
    return torch.cat(
        (frequencies[:n_rotated] / config.scaling_factor, torch.zeros_like(frequencies[n_rotated:]))
    )


_SCALINGS: dict[Scaling, Frequencies] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "yarn_untruncated": _yarn,
    "dynamic": _dynamic,
    "longrope": _longrope,
    "proportional": _proportional,
}


def rope_frequencies(
    config: RoPEConfig,
    head_dim: int,
    lengths_BL: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the angular frequency of each of the R / 2 rotated pairs, float32, broadcastable to
    (B, L, 1, R / 2).

    Args:
        lengths_BL: length of each token's document, if `config.depends_on_length`.
    """
    rotated = config.rotated_dim(head_dim)
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated
    frequencies = config.theta**-exponents
    if not config.is_scaled:
        return frequencies
    lengths = None if lengths_BL is None else lengths_BL[:, :, None, None].float()
    return _SCALINGS[config.scaling](config, frequencies, lengths)


def rope_cos_sin(
    config: RoPEConfig, head_dim: int, positions_BL: Tensor, lengths_BL: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the angles of every position, float32, each (B, L, 1, R / 2).

    Args:
        lengths_BL: as in `rope_frequencies`.
    """
    frequencies = rope_frequencies(config, head_dim, lengths_BL, positions_BL.device)
    angles = positions_BL[:, :, None, None].float() * frequencies
    factor = attention_factor(config)
    return (
        (angles.cos(), angles.sin())
        if factor == 1.0
        else (angles.cos() * factor, angles.sin() * factor)
    )


def check_growth(growth: float, rope: RoPEConfig) -> None:
    """Raise `UserError` unless queries may grow with their position by this factor
    (`TemperedAttention`), which counts in original contexts of YaRN."""
    require(growth >= 0, "--model.llama_4_scaling_beta", growth, "from 0")
    kind = rope.scaling if rope.is_scaled else "none"
    must = "yarn, with a scaling_factor"
    require(kind.startswith("yarn"), "--model.rope.scaling", kind, must)


def attention_factor(config: RoPEConfig) -> float:
    factor = config.scaling_factor
    if config.scaling not in ("yarn", "yarn_untruncated", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if factor <= 1.0:
        return 1.0
    if config.scaling == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(config.original_max_seq_len))
    return 0.1 * math.log(factor) + 1.0  # YaRN, section 3.4


def apply_rope(x_BLHD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first R elements of each head of queries or keys in float32; return them in their
    own type. As in Hugging Face, i pairs with i + R/2."""
    cos, sin = cos_sin
    rotated_dim = 2 * cos.shape[-1]
    first, second = x_BLHD[..., :rotated_dim].float().chunk(2, dim=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if rotated_dim < x_BLHD.shape[-1]:
        parts.append(x_BLHD[..., rotated_dim:].float())
    return torch.cat(parts, dim=-1).type_as(x_BLHD)

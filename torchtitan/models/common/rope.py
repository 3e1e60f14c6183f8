"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), with Llama 3.1's scaling for long contexts."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchtitan.tools.errors import UserError


@dataclass(kw_only=True, slots=True)
class RoPEConfig:
    """Rotary position embedding."""

    theta: float = 500_000.0
    """Base of the geometric series of wavelengths."""

    scaling: Literal["llama3", "linear"] = "llama3"
    """Frequencies divided by scaling_factor: `llama3`, low frequencies; `linear`, all (position interpolation)."""

    scaling_factor: float = 1.0
    """Ratio of the context to the original one, by which frequencies are divided. 1: unscaled."""

    low_freq_factor: float = 1.0
    """Wavelengths above original_max_seq_len divided by this are scaled in full."""

    high_freq_factor: float = 4.0
    """Wavelengths below original_max_seq_len divided by this are not scaled."""

    original_max_seq_len: int = 8192
    """Context in tokens that the model was trained with before scaling."""

    def validate(self) -> None:
        if not (0 < self.theta < math.inf and 0 < self.scaling_factor < math.inf):
            raise UserError(
                f"--model.rope: theta {self.theta} and scaling_factor {self.scaling_factor} must be above 0"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise UserError(
                f"--model.rope.high_freq_factor {self.high_freq_factor} must be above "
                f"low_freq_factor {self.low_freq_factor}, and both finite and above 0"
            )
        if not 1 <= self.original_max_seq_len <= 2**32:
            raise UserError(
                f"--model.rope.original_max_seq_len is {self.original_max_seq_len}, but must be from 1 to {2**32}"
            )


def rope_frequencies(config: RoPEConfig, head_dim: int, device: torch.device) -> Tensor:
    """Return the angular frequency of each rotated pair, float32, shape (head_dim / 2,).

    Linear scaling is position interpolation (Chen et al. 2023, arXiv:2306.15595). Llama 3's scaling divides the
    frequencies of long wavelengths, keeps the frequencies of short ones, and interpolates linearly in 1 / wavelength in
    between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = config.theta**-exponents
    if config.scaling == "linear" or config.scaling_factor == 1.0:
        return frequencies / config.scaling_factor
    # Turns of a pair within the original context: many for high frequencies, few for low ones.
    turns = config.original_max_seq_len * frequencies / (2 * math.pi)
    kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * frequencies / config.scaling_factor + kept * frequencies


def rope_cos_sin(config: RoPEConfig, head_dim: int, positions_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the angles of every position, float32, each (B, L, 1, head_dim / 2)."""
    frequencies = rope_frequencies(config, head_dim, positions_BL.device)
    angles = positions_BL[:, :, None, None].float() * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x_BLHD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys in float32; return them in their own type. As in Hugging Face, i pairs with i + D/2."""
    cos, sin = cos_sin
    first, second = x_BLHD.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.type_as(x_BLHD)

"""Sampling of the next token from a model's logits."""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.tools.errors import UserError

_COLDEST = 1e-30  # below this, the temperature or its inverse is out of range in float32


@dataclass(kw_only=True, slots=True)
class Sampling:
    """Sampling settings, applied in the order temperature, top_k, top_p."""

    temperature: float = 0.0
    """Divisor of the logits: less random below 1, more random above. 0: always the most probable token."""

    top_k: int | None = None
    """Number of most probable tokens to sample from; None: all."""

    top_p: float | None = None
    """Sample from the smallest set of most probable tokens with this total probability; None: all."""

    seed: int = 0
    """Random seed; the same seed, prompts and options generate the same text."""

    def validate(self) -> None:
        """Raise `UserError` for a value out of range."""
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature is {self.temperature}, but must be 0 or above")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}, but must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}, but must be above 0 and at most 1")


class Sampler:
    """Samples one token per row. Each row has a random number generator on the CPU, so that results depend only on the
    row's logits, the seed and the row number, not on other rows or the device."""

    def __init__(self, sampling: Sampling, rows: int):
        sampling.validate()
        self.sampling = sampling
        self._generators = [torch.Generator().manual_seed(_row_seed(sampling.seed, row)) for row in range(rows)]

    def draw(self, logits_BV: Tensor) -> Tensor:
        """Return one token id per row, int64, shape (B,) on the CPU, for logits of any floating-point type."""
        if self.sampling.temperature == 0:
            return logits_BV.argmax(dim=-1).cpu()
        weights_BV = restricted_logits(logits_BV, self.sampling).softmax(dim=-1).cpu()
        drawn = [
            torch.multinomial(weights_V, 1, generator=generator)
            for weights_V, generator in zip(weights_BV, self._generators, strict=True)
        ]
        return torch.cat(drawn)


def restricted_logits(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return float32 logits (B, V) after temperature (above 0), top_k and top_p, up to a constant per row; excluded
    tokens get -inf. With top_p (Holtzman et al. 2020, arXiv:1904.09751) the token that crosses the threshold is
    included."""
    logits_BV = logits_BV.float()
    # The largest logit is 0, so that others may become -inf, but never inf.
    logits_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / max(sampling.temperature, _COLDEST)
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[-1]:
        smallest_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -math.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        probabilities_BV = sorted_BV.softmax(dim=-1)
        more_probable_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
        dropped_BV = (more_probable_BV >= sampling.top_p).scatter(1, order_BV, more_probable_BV >= sampling.top_p)
        logits_BV = logits_BV.masked_fill(dropped_BV, -math.inf)
    return logits_BV


def _row_seed(seed: int, row: int) -> int:
    """Hash seed and row. (With seed + row, row 1 of seed 0 would equal row 0 of seed 1.)"""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest(), "big") >> 1

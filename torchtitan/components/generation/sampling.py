"""How the next token is chosen from a model's logits."""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.tools.errors import UserError

_COLDEST = 1e-30  # below, a temperature or its inverse is nothing that float32 has; logits are never this close


@dataclass(kw_only=True, slots=True)
class Sampling:
    """How each next token is drawn. The restrictions apply in the order temperature, top_k, top_p."""

    temperature: float = 0.0
    """Logits are divided by it: below 1 sharper, above 1 flatter. 0: always the most probable token."""

    top_k: int | None = None
    """Draw among this many most probable tokens only. None: among all."""

    top_p: float | None = None
    """Draw among the fewest most probable tokens that together have this probability. None: among all."""

    seed: int = 0
    """Of the draws; with the same seed, prompts and options, the same text."""

    def validate(self) -> None:
        """Raise `UserError` for a value that restricts to nothing."""
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature is {self.temperature}, and must be 0 or above")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}, and must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}, and must be above 0 and at most 1")


class Sampler:
    """Draws one token per row, each with a random number generator of its own, on the CPU: what a row gets depends on
    its logits, the seed and its number, and not on the other rows or the device."""

    def __init__(self, sampling: Sampling, rows: int):
        sampling.validate()
        self.sampling = sampling
        self._generators = [torch.Generator().manual_seed(_row_seed(sampling.seed, row)) for row in range(rows)]

    def draw(self, logits_BV: Tensor) -> Tensor:
        """One token id per row, int64, shape (B,) on the CPU, for logits of any floating-point type."""
        if self.sampling.temperature == 0:
            return logits_BV.argmax(dim=-1).cpu()
        weights_BV = restricted_logits(logits_BV, self.sampling).softmax(dim=-1).cpu()
        drawn = [
            torch.multinomial(weights_V, 1, generator=generator)
            for weights_V, generator in zip(weights_BV, self._generators, strict=True)
        ]
        return torch.cat(drawn)


def restricted_logits(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Logits after temperature (above 0), top_k and top_p, float32 and up to a constant in each row: -inf for what
    cannot be drawn, shape (B, V).

    top_p is nucleus sampling (Holtzman et al. 2020, arXiv:1904.09751): the token that crosses the bound still counts.
    """
    logits_BV = logits_BV.float()
    # With the largest at 0, the others may well become -inf, and none inf.
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
    """Neighboring seeds of torch's generator would make row 1 of seed 0 the twin of row 0 of seed 1."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest(), "big") >> 1

"""Sampling of the next token from a model's logits."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.tools.device import send
from torchtitan.tools.errors import require

_BLOCK = 256
_NUMBERS = 32  # drawn at a time
_COLDEST = 1e-30  # below this, the temperature or its inverse is out of range in float32


@dataclass(kw_only=True, slots=True)
class Sampling:
    """Sampling settings, applied in the order temperature, top_k, top_p, min_p."""

    temperature: float = 0.0
    """Divisor of the logits: less random below 1, more random above. 0: always the most probable
    token."""

    top_k: int | None = None
    """Number of most probable tokens to sample from; None: all."""

    top_p: float | None = None
    """Sample from the smallest set of most probable tokens with this total probability; None:
    all."""

    min_p: float | None = None
    """Sample only from tokens with at least this share of the largest probability; None: all."""

    seed: int = 0
    """Random seed; the same seed, prompts and options generate the same text."""

    def validate(self) -> None:
        """Raise `UserError` for a value out of range."""
        require(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 or above")
        require(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "at least 1")
        require(
            self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1"
        )
        require(self.min_p is None or 0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1")

    @property
    def is_plain(self) -> bool:
        """True if tokens are drawn from the model's own distribution."""
        restricts = self.top_k, self.top_p not in (None, 1.0), self.min_p
        return self.temperature == 1 and not any(restricts)

    @property
    def settings(self) -> tuple[float | None, ...]:
        """All but the seed."""
        return self.temperature, self.top_k, self.top_p, self.min_p


class RandomNumbers(Iterator[float]):
    """A text's random numbers from 0 to below 1, which depend on all characters of `key`."""

    def __init__(self, key: str):
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        self.seed = int.from_bytes(digest, "big") >> 1
        self._generator = torch.Generator().manual_seed(self.seed)
        self._next: Iterator[float] = iter(())

    def __next__(self) -> float:
        number = next(self._next, None)
        if number is None:  # several at once, which are the same numbers
            numbers = torch.rand(_NUMBERS, generator=self._generator, dtype=torch.float64)
            self._next = iter(numbers.tolist())
            number = next(self._next)
        return number


def draw(
    logits_BV: Tensor,
    sampling: Sampling,
    numbers: Sequence[Iterator[float]],
    weights_BV: Tensor | None = None,
) -> Tensor:
    """Return one token id per row, int64, shape (B,) on the device of the logits, of any
    floating-point type.

    Each row draws one of its own random numbers, and looks it up in its cumulative
    distribution, in float64. So a row depends only on its logits and its number; logits that
    differ by rounding give another token only if the number is that close to a boundary of the
    distribution. `weights_BV` are the exponentials of the logits below each row's largest one,
    float32, which a draw without restrictions needs, if they are known.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    if weights_BV is None or not sampling.is_plain:
        weights_BV = restricted_logits(logits_BV, sampling).exp_()
    device = weights_BV.device
    if device.type == "mps":  # has no float64
        weights_BV = weights_BV.cpu()
    # Sums of blocks are much faster than one of all tokens: first find the block, then the token in
    # it.
    n_missing = -weights_BV.shape[1] % _BLOCK
    padded_BV = F.pad(weights_BV, (0, n_missing)) if n_missing else weights_BV
    blocks_BKE = padded_BV.unflatten(1, (-1, _BLOCK))
    drawn_B = torch.tensor([next(own) for own in numbers], dtype=torch.float64)
    ends_BK = blocks_BKE.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    places_B1 = send(drawn_B, ends_BK.device)[:, None] * ends_BK[:, -1:]
    chosen_B1 = torch.searchsorted(ends_BK, places_B1, right=True).clamp(max=ends_BK.shape[1] - 1)
    places_B1 = places_B1 - F.pad(ends_BK, (1, 0)).gather(1, chosen_B1)
    rows_B = torch.arange(len(blocks_BKE), device=blocks_BKE.device)
    ends_BE = blocks_BKE[rows_B, chosen_B1[:, 0]].double().cumsum(dim=-1)
    # Rounding must not pass the block's last token with a probability.
    places_B1 = places_B1.minimum(ends_BE[:, -1:].nextafter(torch.zeros_like(places_B1)))
    tokens_B1 = chosen_B1 * _BLOCK + torch.searchsorted(ends_BE, places_B1, right=True)
    return tokens_B1[:, 0].clamp(max=weights_BV.shape[1] - 1).to(device)


def sampled_logprobs(logits_BV: Tensor, sampling: Sampling, tokens_B: Tensor) -> Tensor:
    """Return the natural logarithms (B,), float32, of the tokens' probabilities in the distribution
    that `draw` draws them from: after the temperature, and renormalized over the tokens that top_k,
    top_p and min_p keep. At temperature 0, the drawn token is certain."""
    if sampling.temperature == 0:
        return torch.zeros(len(logits_BV), device=logits_BV.device)
    logprobs_BV = restricted_logits(logits_BV, sampling).log_softmax(dim=-1)
    return logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def restricted_logits(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return float32 logits (B, V) after temperature (above 0), top_k, top_p and min_p, up to a
    constant per row; excluded tokens get -inf. With top_p (Holtzman et al., arXiv:1904.09751), the
    token that crosses the threshold is kept. min_p: Nguyen et al., arXiv:2407.01082."""
    logits_BV = logits_BV.float()
    # The largest logit is 0, so that others may become -inf, but never inf.
    logits_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
    if sampling.temperature != 1:
        logits_BV.div_(max(sampling.temperature, _COLDEST))
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[-1]:
        smallest_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -math.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        probabilities_BV = sorted_BV.softmax(dim=-1)
        more_probable_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
        dropped_BV = (more_probable_BV >= sampling.top_p).scatter(
            1, order_BV, more_probable_BV >= sampling.top_p
        )
        logits_BV = logits_BV.masked_fill(dropped_BV, -math.inf)
    if sampling.min_p:
        logits_BV = logits_BV.masked_fill(logits_BV < math.log(sampling.min_p), -math.inf)
    return logits_BV

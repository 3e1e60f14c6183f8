"""Importance weights: corrections of a loss for samples of another distribution than the trained
one, since the sampler rounds differently, restricts its tokens or has older weights."""

from typing import Literal

import torch
from torch import Tensor

Importance = Literal["token", "sequence", "token_mask", "sequence_mask"]
"""Unit of the weights, and whether a larger one than the maximum is cut or removes its unit."""


def importance_weights(
    old_N: Tensor, sampler_N: Tensor, places_N: Tensor, kind: Importance = "token", most: float = 2
) -> tuple[Tensor, Tensor]:
    """Return the weight of each token, without gradients, and whether its ratio exceeded `most`.

    With the log-probabilities of the trainer at the start of the step and of the sampler, the ratio
    is p_old / p_sampler of the token (https://fengyao.notion.site/off-policy-rl) or the product
    over the tokens of its sample, whose weights are exact for whole samples but vary more
    (https://richardli.xyz/rl-collapse). A ratio above `most` counts as `most`, or with `_mask` as
    0.

    Args:
        places_N: number of each token's sample, from 0.
    """
    differences_N = (old_N - sampler_N).detach()
    if kind.startswith("sequence"):
        differences_N = sample_sums(differences_N, places_N)
    ratios_N = differences_N.exp()
    exceeds_N = ratios_N > most
    if kind.endswith("_mask"):
        return ratios_N.masked_fill(exceeds_N, 0), exceeds_N
    return ratios_N.clamp(max=most), exceeds_N


def sample_sums(values_N: Tensor, places_N: Tensor) -> Tensor:
    """Return for each token the sum of values over its sample, (N,). `places_N` are
    numbers of samples, below N."""
    return torch.zeros_like(values_N).index_add(0, places_N, values_N)[places_N]

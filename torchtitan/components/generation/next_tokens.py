"""The next token of each text in a batch."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchtitan.components.generation.row import Row
from torchtitan.components.generation.sampling import Sampling, draw, sampled_logprobs

LogprobsOf = Literal["model", "sampling"]


class NextToken(NamedTuple):
    """A token that was drawn for a row."""

    token: int
    logprob: float
    """Its natural logarithm, see `Generation.logprobs`."""
    is_finite: bool
    """True if the logits of the row are."""
    top: list[tuple[int, float]]
    """The most probable tokens with their log-probabilities, as many as any row needs."""


def next_tokens(
    rows: Sequence[Row], logits_BV: Tensor, *, logprobs_of: LogprobsOf
) -> list[NextToken]:
    """Draw a token for each row from its logits; any token for finished rows."""
    logits_BV = logits_BV.float()
    peaks_B1 = logits_BV.amax(dim=-1, keepdim=True)
    # of the model's own distribution, from which most texts draw
    weights_BV = (logits_BV - peaks_B1).exp_()
    sums_B = weights_BV.sum(dim=-1).log() + peaks_B1[:, 0]
    groups = _places_by_settings(rows)
    tokens_B = _draw(rows, logits_BV, weights_BV, groups)
    logprobs_B = logits_BV.gather(1, tokens_B[:, None])[:, 0] - sums_B
    if logprobs_of == "sampling":
        for sampling, places in groups:
            if not sampling.is_plain:
                logprobs_B[places] = sampled_logprobs(logits_BV[places], sampling, tokens_B[places])
    # Read once, since reading waits for the device. A float32 holds any token id exactly.
    columns = tokens_B.to(sums_B), logprobs_B, sums_B.isfinite().to(sums_B)
    drawn = torch.stack(columns).T.tolist()
    tops = _most_probable(rows, logits_BV, sums_B)
    return [
        NextToken(int(token), logprob, bool(is_finite), top)
        for (token, logprob, is_finite), top in zip(drawn, tops, strict=True)
    ]


def _places_by_settings(rows: Sequence[Row]) -> list[tuple[Sampling, list[int]]]:
    """Return the places of rows with equal settings of sampling, without finished rows."""
    places_of: dict[tuple[object, ...], list[int]] = {}
    for place, row in enumerate(rows):
        if not row.is_done:
            places_of.setdefault(row.sampling.settings, []).append(place)
    return [(rows[places[0]].sampling, places) for places in places_of.values()]


def _draw(
    rows: Sequence[Row],
    logits_BV: Tensor,
    weights_BV: Tensor,
    groups: Sequence[tuple[Sampling, list[int]]],
) -> Tensor:
    """Draw for all rows with equal settings at once, with `weights_BV` of the model's own
    distribution."""
    if len(groups) == 1:
        return draw(logits_BV, groups[0][0], [row.numbers for row in rows], weights_BV)
    tokens_B = torch.zeros(len(rows), dtype=torch.int64, device=logits_BV.device)
    for sampling, places in groups:
        numbers = [rows[place].numbers for place in places]
        weights = weights_BV[places] if sampling.is_plain else None
        tokens_B[places] = draw(logits_BV[places], sampling, numbers, weights)
    return tokens_B


def _most_probable(
    rows: Sequence[Row], logits_BV: Tensor, sums_B: Tensor
) -> Sequence[list[tuple[int, float]]]:
    """Return the most probable tokens of each row, as many as any row needs."""
    n_top = max(0 if row.is_done else row.n_top for row in rows)
    if not n_top:
        return [[] for _ in rows]
    largest = logits_BV.topk(n_top)
    logprobs_BN = largest.values - sums_B[:, None]
    both = torch.stack((largest.indices.to(logprobs_BN), logprobs_BN), dim=-1).tolist()
    return [[(int(token), logprob) for token, logprob in row] for row in both]

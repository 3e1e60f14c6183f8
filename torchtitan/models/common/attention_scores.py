"""Scores of attention: the largest of each head, and the weights that they follow from."""

import torch
from torch import Tensor, nn

BLOCK = 512
"""Queries whose scores are in memory at once."""


def largest_scores(
    q_BLHD: Tensor, k_BSKD: Tensor, starts_BL: Tensor, queries_L: Tensor, keys_S: Tensor
) -> Tensor:
    """Return the largest product of a query of each head with a key that it sees, float32 (H,).
    `starts_BL` (B or 1, L), `queries_L` and `keys_S`: as `_seen_ranges` returns them."""
    q_BKGLD = q_BLHD.float().transpose(1, 2).unflatten(1, (k_BSKD.shape[2], -1))
    k_BK1DS = k_BSKD.float().permute(0, 2, 3, 1)[:, :, None]
    peaks_H = torch.full((q_BLHD.shape[2],), -torch.inf, device=q_BLHD.device)
    for first in range(0, q_BLHD.shape[1], BLOCK):
        part = slice(first, first + BLOCK)
        scores_BKGLS = q_BKGLD[..., part, :] @ k_BK1DS
        is_seen = (keys_S >= starts_BL[:, part, None]) & (keys_S <= queries_L[part, None])
        scores_BKGLS = scores_BKGLS.masked_fill(~is_seen[:, None, None], -torch.inf)
        peaks_H = torch.maximum(peaks_H, scores_BKGLS.amax(dim=(0, 3, 4)).flatten())
    return peaks_H


def reason_not_to_scale(*projections: nn.Module) -> str:
    """Return what keeps scores from following the weights of linear layers, "" for nothing."""
    for projection in projections:
        rows = _row_parameters(projection)
        if hasattr(projection, "lora_B") and "magnitude" not in rows:
            return (
                "its projections have adapters without magnitudes, which alone scale rows of a "
                "frozen weight (DoRA)"
            )
        if frozen := [name for name, each in rows.items() if not each.requires_grad]:
            return f"its projections are frozen ({', '.join(frozen)})"
    return ""


def rows_of(projection: nn.Module, factor_E: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters of a linear layer that scale its outputs, with the factor of each
    output."""
    return [(parameter, factor_E) for parameter in _row_parameters(projection).values()]


def _row_parameters(projection: nn.Module) -> dict[str, Tensor]:
    """Return the parameters whose rows, all multiplied by a factor, multiply the outputs by this
    factor. DoRA's magnitude of each row replaces the frozen matrix and its adapter."""
    named = dict(projection.named_parameters(recurse=False))
    matrix = "magnitude" if "magnitude" in named else "weight"
    return {name: named[name] for name in (matrix, "bias") if name in named}

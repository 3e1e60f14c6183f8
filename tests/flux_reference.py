"""The transformer of FLUX in diffusers, called as its pipelines do."""

from typing import Any

import torch
from torch import Tensor


def flux_velocity(
    reference: Any,
    images_BCHW: Tensor,
    times_B: Tensor,
    *,
    text: Tensor,
    pooled: Tensor,
    guidance: Tensor | None,
) -> Tensor:
    """Cut latents into patches, and return the velocity of each patch, (B, L, 4 C)."""
    n, channels, height, width = images_BCHW.shape
    rows, columns = height // 2, width // 2
    places = torch.zeros(rows, columns, 3)
    places[..., 1], places[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
    cut = images_BCHW.view(n, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5)
    velocity: Tensor = reference(
        cut.reshape(n, rows * columns, 4 * channels),
        text,
        pooled,
        times_B,
        places.reshape(-1, 3),
        torch.zeros(text.shape[1], 3),
        guidance,
    ).sample
    return velocity

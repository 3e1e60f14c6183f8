"""Euler's method from noise to data, along the velocities of a model."""

from collections.abc import Callable

import torch
from torch import Tensor

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x (B, …), times (B,) float32) → velocity (B, …)."""


def times_of(n_steps: int, shift: float = 1.0, device: torch.device | str = "cpu") -> Tensor:
    """Return the times from 1 to 0 between the steps, float32 (n_steps + 1,).

    `shift` s above 1 spends more steps at high noise, as for large images: t becomes
    s t / (1 + (s - 1) t) (arXiv:2403.03206, equation 23).
    """
    times = torch.linspace(1, 0, n_steps + 1, dtype=torch.float64)
    return (shift * times / (1 + (shift - 1) * times)).float().to(device)


@torch.no_grad()
def euler(velocity: Velocity, noise: Tensor, times: Tensor) -> Tensor:
    """Follow velocities from `noise` (B, …) at the first of `times` to the last, in steps of
    Euler's method, and return the data, (B, …)."""
    x = noise
    for now, following in zip(times[:-1], times[1:], strict=True):
        x = x + (following - now) * velocity(x, now.expand(len(x))).to(x.dtype)
    return x


def guided(conditional: Velocity, unconditional: Velocity, scale: float) -> Velocity:
    """Return velocities with classifier-free guidance: u + scale (c - u), with velocities c under a
    condition and u without one. 1: the condition alone."""
    if scale == 1:
        return conditional

    def velocity(x: Tensor, times_B: Tensor) -> Tensor:
        without = unconditional(x, times_B)
        return without + scale * (conditional(x, times_B) - without)

    return velocity

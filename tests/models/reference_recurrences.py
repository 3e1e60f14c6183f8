"""Functions with the names, the parameters and the meaning of flash-linear-attention's and Mamba's
kernels, computed by definition, one token after another, on any device."""

from typing import Any

import torch
from torch import Tensor


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:
    """The gated delta rule, with a decay per element of a head's keys (arXiv:2510.26692, equation
    1)."""
    repeats = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
    outs = []
    for t in range(q.shape[1]):
        if t in _starts(q, cu_seqlens, cu_seqlens_cpu):
            state = q.new_zeros(len(q), q.shape[2], q.shape[3], v.shape[3])
        state = g[:, t, :, :, None].exp() * state
        seen = torch.einsum("bhef,bhe->bhf", state, k[:, t])
        change = beta[:, t, :, None] * (v[:, t] - seen)
        state = state + k[:, t, :, :, None] * change[:, :, None]
        outs.append((k.shape[-1] ** -0.5 if scale is None else scale) * _read(state, q[:, t]))
    return torch.stack(outs, dim=1), None


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    assert g.shape == v.shape[:3], "one decay per head"
    return chunk_kda(q, k, v, g[..., None], beta, **options)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:
    assert g is not None and q.shape == k.shape
    outs = []
    for t in range(q.shape[1]):
        if t in _starts(q, cu_seqlens, cu_seqlens_cpu):
            state = q.new_zeros(len(q), q.shape[2], q.shape[3], v.shape[3])
        state = g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None]
        outs.append((k.shape[-1] ** -0.5 if scale is None else scale) * _read(state, q[:, t]))
    return torch.stack(outs, dim=1), None


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Mamba 2 without D, z and the softplus of steps."""
    assert seq_idx is not None and seq_idx.dtype == torch.int32 and seq_idx.shape == x.shape[:2]
    repeats = x.shape[2] // B.shape[2]
    B, C = (each.repeat_interleave(repeats, dim=2) for each in (B, C))
    state, before, outs = (
        B.new_zeros(*B[:, 0].shape, x.shape[-1]),
        torch.zeros_like(seq_idx[:, 0]),
        [],
    )
    for t, document in enumerate(seq_idx.unbind(1)):
        state = (document == before)[:, None, None, None] * state
        added = B[:, t, :, :, None] * (dt[:, t, :, None] * x[:, t])[:, :, None]
        state = (A * dt[:, t]).exp()[..., None, None] * state + added
        outs.append(_read(state, C[:, t]))
        before = document
    return torch.stack(outs, dim=1)


def _read(state: Tensor, query: Tensor) -> Tensor:
    return torch.einsum("bhef,bhe->bhf", state, query)


def _starts(q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> list[int]:
    """Return the first token of each document. Boundaries are of a single row."""
    if cu_seqlens is None:
        return [0]
    assert len(q) == 1 and cu_seqlens_cpu is not None and cu_seqlens.dtype == torch.long
    assert cu_seqlens[0] == 0 and cu_seqlens[-1] == q.shape[1]
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    return cu_seqlens[:-1].tolist()

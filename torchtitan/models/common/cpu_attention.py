"""Causal bfloat16 attention for CPUs, from batched matrix products, which PyTorch's kernel does not
use.

The scores of a query are computed twice: for their maximum, and minus it. With S the scaled scores,
l their log-sum-exp, P = exp(S - l), O = P V and G the gradient of O, the gradients are V: P^T G,
and S: P * (G V^T - d) with d the row sums of G * O (FlashAttention 2, Dao 2023, arXiv:2307.08691,
algorithm 2). The products round to bfloat16. So that the differences S - l and G V^T - d are
rounded, and not the terms, l and d are two further columns of the factors, high and low bits of
each.
"""

import torch
from torch import Tensor

from torchtitan.tools.device import multiplies

_QUERIES = 128
"""Queries per chunk, few enough that their probabilities for all keys stay in the cache."""


def on_cpu(q_BLHD: Tensor) -> bool:
    """Return whether queries are a plain tensor on a CPU, in code that is not compiled."""
    is_plain = type(q_BLHD) is Tensor and not torch.compiler.is_compiling()
    return is_plain and q_BLHD.device.type == "cpu"


def supports(q_BHLD: Tensor) -> bool:
    """Return whether queries are in bfloat16 on a CPU that multiplies bfloat16."""
    return on_cpu(q_BHLD) and q_BHLD.dtype == torch.bfloat16 and multiplies(torch.bfloat16)


def causal_products(
    q_BHLD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend H query heads to K key/value heads (K divides H), (B, heads, L, head_dim) each. Return
    the results, and the log-sum-exp of scores, float32 (B, H, L)."""
    n_kv_heads, length = k_BKLD.shape[1:3]
    out_BHLD = torch.empty_like(q_BHLD)
    lse_BHL = torch.empty(q_BHLD.shape[:3], dtype=torch.float32)
    queries, out, lse = (x.unflatten(1, (n_kv_heads, -1)) for x in (q_BHLD, out_BHLD, lse_BHL))
    keys = torch.cat((k_BKLD, k_BKLD.new_ones(*k_BKLD.shape[:3], 1)), dim=-1).flatten(0, 1)
    values = v_BKLD.flatten(0, 1)
    for start in range(0, length, _QUERIES):
        end = min(start + _QUERIES, length)
        q = queries[..., start:end, :].flatten(2, 3).flatten(0, 1)
        scores = _causal_scores(q, keys[:, :end, :-1], scale, start)
        # One more column of the factors subtracts the maximum before the scores are rounded.
        # The rest of it (it was rounded itself) could overflow if scores are in the thousands,
        # so it is subtracted later.
        shifted = torch.cat((q, -scores.amax(dim=-1, keepdim=True) / scale), dim=-1)
        scores = _causal_scores(shifted, keys[:, :end], scale, start)
        rest = scores.amax(dim=-1, keepdim=True)
        weights = scores.sub_(rest).exp_()
        sums = weights.sum(dim=-1, keepdim=True, dtype=torch.float32)
        block = out[..., start:end, :]
        block.copy_((torch.bmm(weights, values[:, :end]) / sums).view_as(block))
        lse[..., start:end] = (sums.log() + rest - scale * shifted[..., -1:].float()).view_as(
            lse[..., start:end]
        )
    return out_BHLD, lse_BHL


def causal_gradients(
    grad_BHLD: Tensor,
    q_BHLD: Tensor,
    k_BKLD: Tensor,
    v_BKLD: Tensor,
    out_BHLD: Tensor,
    lse_BHL: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from the gradient of the results."""
    n_samples, _, length, dim = q_BHLD.shape
    n_kv_heads = k_BKLD.shape[1]
    # Probabilities are multiplied by the square root of the number of keys, a compromise between
    # diffuse and peaked attention: their logarithms are then small, with small rounding errors.
    # The gradient is divided by this root instead.
    weight_L1 = torch.arange(1, length + 1, dtype=torch.float32).rsqrt()[:, None]
    shift_BHL1 = (lse_BHL[..., None] + weight_L1.log()) / scale
    weighted_BHLD = grad_BHLD * weight_L1
    row_sums_BHL1 = (weighted_BHLD * out_BHLD).sum(-1, keepdim=True)
    # (B, K, H / K, L, D + 2), and (B K, L, D + 2) of keys and values.
    queries, grads = (
        _with_terms(x, -terms).unflatten(1, (n_kv_heads, -1))
        for x, terms in ((q_BHLD, shift_BHL1), (weighted_BHLD.to(q_BHLD.dtype), row_sums_BHL1))
    )
    ones = k_BKLD.new_ones(*k_BKLD.shape[:3], 2)
    keys, values = (torch.cat((x, ones), dim=-1).flatten(0, 1) for x in (k_BKLD, v_BKLD))
    grad_q = torch.empty_like(queries[..., :dim], memory_format=torch.contiguous_format)
    grad_k, grad_v = (torch.zeros_like(x[..., :dim], dtype=torch.float32) for x in (keys, values))
    for start in range(0, length, _QUERIES):
        end = min(start + _QUERIES, length)
        q, g = (x[..., start:end, :].flatten(2, 3).flatten(0, 1) for x in (queries, grads))
        weights = _product(q, keys[:, :end].mT, scale).exp_()
        weights.unflatten(1, (-1, end - start))[..., start:].tril_()
        grad_v[:, :end] += torch.bmm(weights.mT, g[..., :dim])
        grad_scores = torch.bmm(g, values[:, :end].mT).mul_(weights)
        grad_k[:, :end] += _product(grad_scores.mT, q[..., :dim], scale)
        grad_q_block = _product(grad_scores, keys[:, :end, :dim], scale)
        grad_q[..., start:end, :] = grad_q_block.view(n_samples, n_kv_heads, -1, end - start, dim)
    return (
        grad_q.flatten(1, 2),
        grad_k.type_as(k_BKLD).view_as(k_BKLD),
        grad_v.type_as(v_BKLD).view_as(v_BKLD),
    )


def _causal_scores(q: Tensor, keys: Tensor, scale: float, start: int) -> Tensor:
    """Return the scores of the queries from `start` on, (batch, heads * queries, keys), for all
    keys up to them."""
    scores, n_queries = _product(q, keys.mT, scale), keys.shape[1] - start
    unseen = torch.ones(n_queries, n_queries, dtype=torch.bool).triu(1)
    scores.unflatten(1, (-1, n_queries))[..., start:].masked_fill_(unseen, -torch.inf)
    return scores


def _with_terms(x: Tensor, terms: Tensor) -> Tensor:
    """Append the high and low bits of `terms` to the last dimension."""
    high = terms.to(x.dtype)
    return torch.cat((x, high, (terms - high).to(x.dtype)), dim=-1)


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return `scale * (a @ b)`, rounded once."""
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)

"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245), causal within packed documents."""

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.common.layers import RMSNorm
from torchtitan.models.common.rope import apply_rope
from torchtitan.protocols.attention import AttentionMetadata, Kernel
from torchtitan.protocols.initializer import TruncatedNormal, with_initializers


def choose_kernel(
    attention: AttentionMetadata, *, device: torch.device, dtype: torch.dtype, head_dim: int, static: bool
) -> Kernel:
    """Return the fastest computation of attention that supports a batch.

    Args:
        dtype: type of queries, keys and values.
        static: compiled code calls the kernel. It specializes on shapes, so they must not depend on the documents.
    """
    is_cuda = device.type == "cuda" and head_dim >= 16  # the least width of FlexAttention
    if attention.kernel is not None:
        return attention.kernel
    if attention.key_places_S is not None:
        return "flex" if is_cuda else "dense"  # a rank's queries are at several places
    one_per_row = attention.positions_BL is None or (not static and len(attention.lengths) == attention.n_rows)
    is_cut = attention.window is not None and attention.window < attention.max_seqlen
    if one_per_row and not is_cut:
        return "causal"
    if not is_cuda:
        # Without a mask, scores between documents are not computed. PyTorch has no other such kernel here.
        return "dense" if static else "causal" if one_per_row else "documents"
    # FlashAttention 2, on which `varlen_attn` is based, supports these.
    is_supported = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256
    is_new = torch.cuda.get_device_capability(device) >= (8, 0)
    return "varlen" if is_supported and is_new and not static else "flex"


def with_kernel(
    attention: AttentionMetadata, *, device: torch.device, dtype: torch.dtype, head_dim: int, static: bool
) -> AttentionMetadata:
    """Add the chosen kernel and its input. This is done once per batch and window, not in each layer, and outside of
    compiled and checkpointed code."""
    kernel = choose_kernel(attention, device=device, dtype=dtype, head_dim=head_dim, static=static)
    mask: Any = None
    if kernel == "varlen":
        # Only a copy from pinned memory does not wait for the device.
        mask = attention.cu_seqlens.pin_memory().to(device, non_blocking=True)
    elif kernel in ("dense", "flex"):
        starts_BL, queries_L, keys_S = _seen_ranges(attention, device)
        if kernel == "dense":
            mask = ((keys_S >= starts_BL[..., None]) & (keys_S <= queries_L[:, None]))[:, None]
        else:
            mask = _block_mask(starts_BL.expand(attention.n_rows, -1), queries_L, keys_S)
    return replace(attention, kernel=kernel, mask=mask)


def _seen_ranges(attention: AttentionMetadata, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first place that each token sees, (B or 1, L), the tokens' own places, (L,), and the places of all
    keys, (S,). Documents are contiguous, so a token sees the places from the first to its own."""
    positions_BL, queries_L, keys_S = attention.positions_BL, attention.query_places_L, attention.key_places_S
    if queries_L is None or keys_S is None:
        length = attention.max_seqlen if positions_BL is None else positions_BL.shape[1]
        queries_L = keys_S = torch.arange(length, device=device)
    starts_BL = torch.zeros_like(queries_L)[None] if positions_BL is None else queries_L - positions_BL
    if attention.window is not None:
        starts_BL = torch.maximum(starts_BL, queries_L - (attention.window - 1))
    return starts_BL, queries_L, keys_S


def _block_mask(starts_BL: Tensor, queries_L: Tensor, keys_S: Tensor) -> Any:
    def is_seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (keys_S[k] >= starts_BL[b, q]) & (keys_S[k] <= queries_L[q])

    rows, length = starts_BL.shape
    return _compiled("create_block_mask")(is_seen, rows, None, length, len(keys_S), device=str(starts_BL.device))


class Attention(nn.Module):
    """Scaled dot-product attention. It has no weights, and is a module so that hooks can be attached."""

    def forward(self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, attention: AttentionMetadata) -> Tensor:
        """Attend H query heads to K key/value heads (K divides H): (B, L, heads, head_dim) → (B, L, H, head_dim)."""
        if attention.kernel == "documents":
            return _attend_each_document(q_BLHD, k_BLKD, v_BLKD, attention)
        if attention.kernel == "varlen":
            return _attend_varlen(q_BLHD, k_BLKD, v_BLKD, attention)
        q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLKD, v_BLKD))
        if attention.kernel == "causal":
            out_BHLD = _attend_causally(q, k, v, attention.window)
        elif attention.kernel == "dense":
            out_BHLD = F.scaled_dot_product_attention(q, k, v, attn_mask=attention.mask, enable_gqa=True)
        else:
            assert attention.kernel == "flex", "with_kernel must choose a kernel first"
            out_BHLD = _compiled("flex_attention")(q, k, v, block_mask=attention.mask, enable_gqa=True)
        return out_BHLD.transpose(1, 2)


def _attend_causally(q_BHLD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, window: int | None) -> Tensor:
    """Attend within rows that are one document each. With a window of W tokens, each block of W queries takes the 2 W -
    1 keys that it sees, so that the costs are proportional to L W, not to L squared."""
    length = q_BHLD.shape[2]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(q_BHLD, k_BKLD, v_BKLD, is_causal=True, enable_gqa=True)
    seen_WS = q_BHLD.new_ones(window, 2 * window - 1, dtype=torch.bool).triu().tril(window - 1)
    outs = []
    for start in range(0, length, window):
        end, earliest = min(start + window, length), start - window + 1
        first = max(0, earliest)
        q, k, v = q_BHLD[:, :, start:end], k_BKLD[:, :, first:end], v_BKLD[:, :, first:end]
        mask = seen_WS[: end - start, first - earliest : end - earliest]
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True))
    return torch.cat(outs, dim=2)


def _attend_each_document(q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, attention: AttentionMetadata) -> Tensor:
    def split_documents(x_BLHD: Tensor) -> tuple[Tensor, ...]:
        flat_1HTD = x_BLHD.reshape(1, -1, *x_BLHD.shape[2:]).transpose(1, 2)
        return flat_1HTD.split(attention.lengths, dim=2)

    documents = zip(*map(split_documents, (q_BLHD, k_BLKD, v_BLKD)), strict=True)
    outs = [_attend_causally(q, k, v, attention.window) for q, k, v in documents]
    return torch.cat(outs, dim=2).transpose(1, 2).reshape(q_BLHD.shape)


def _attend_varlen(q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, attention: AttentionMetadata) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x.flatten(0, 1) for x in (q_BLHD, k_BLKD, v_BLKD))
    # PyTorch counts the tokens before a token's own, -1 for all, and after it.
    window_size = (-1 if attention.window is None else attention.window - 1, 0)
    ends, longest = attention.mask, attention.max_seqlen
    out_THD = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=window_size, enable_gqa=True)
    assert isinstance(out_THD, Tensor)
    return out_THD.view_as(q_BLHD)


@functools.cache
def _compiled(name: str) -> Any:
    """Compile a function of FlexAttention, which uncompiled would hold scores of all token pairs in memory."""
    import torch.nn.attention.flex_attention as flex_attention

    return torch.compile(getattr(flex_attention, name))


class GroupedQueryAttention(nn.Module):
    """Causal self-attention with fewer key/value heads than query heads.

    Args:
        qk_norm_eps: added to the mean square in the norm of each head's queries and keys; None: no norm.
        init_std: standard deviation of the initial input projections.
        out_init_std: standard deviation of the initial output projection.
    """

    def __init__(
        self,
        *,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        qk_norm_eps: float | None = None,
        init_std: float,
        out_init_std: float,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.attend = Attention()
        init = TruncatedNormal(init_std)
        self.wq = with_initializers(nn.Linear(dim, n_heads * head_dim, bias=False), weight=init)
        self.wk = with_initializers(nn.Linear(dim, n_kv_heads * head_dim, bias=False), weight=init)
        self.wv = with_initializers(nn.Linear(dim, n_kv_heads * head_dim, bias=False), weight=init)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.wo = with_initializers(
            nn.Linear(n_heads * head_dim, dim, bias=False), weight=TruncatedNormal(out_init_std)
        )

    def forward(self, x_BLD: Tensor, rope: tuple[Tensor, Tensor], attention: AttentionMetadata) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        # -1, because a rank holds only some of the heads under tensor parallelism.
        q_BLHD, k_BLKD, v_BLKD = (
            projection(x_BLD).unflatten(-1, (-1, self.head_dim)) for projection in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BLHD, k_BLKD = self.q_norm(q_BLHD), self.k_norm(k_BLKD)
        out_BLHD = self.attend(apply_rope(q_BLHD, rope), apply_rope(k_BLKD, rope), v_BLKD, attention)
        return self.wo(out_BLHD.flatten(-2))

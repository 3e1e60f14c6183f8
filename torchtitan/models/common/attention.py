"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245), causal within packed documents."""

import functools
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.common.layers import RMSNorm
from torchtitan.models.common.rope import apply_rope
from torchtitan.protocols.initializer import TruncatedNormal, with_initializers

AttentionMask: TypeAlias = Any
"""None (causal over the whole window); on CPU and MPS, a list of document lengths, or a boolean tensor (B, 1, Q, K)
that is True if attention is allowed; on CUDA, a FlexAttention `BlockMask`."""


class CausalMask(nn.Module):
    """Mask that limits each token's attention to itself and the earlier tokens of its document."""

    dense = False
    """If true, masks on CPU and MPS are tensors. Lists of lengths are faster but cause recompilation."""

    def forward(
        self, positions_BL: Tensor | None, query_tokens_L: Tensor | None = None, key_tokens_K: Tensor | None = None
    ) -> AttentionMask:
        """Return the mask for L tokens per window. `positions_BL` start at 0 in every document; None: one document per
        window. If a process has only part of each window, `query_tokens_L` and `key_tokens_K` are the places of its
        queries and of all keys in the window."""
        if positions_BL is None:
            assert query_tokens_L is None, "a part of a sample comes with positions"
            return None
        if query_tokens_L is None or key_tokens_K is None:
            if positions_BL.device.type != "cuda" and not self.dense:
                return _document_lengths(positions_BL)
            query_tokens_L = key_tokens_K = torch.arange(positions_BL.shape[1], device=positions_BL.device)
        # Documents are contiguous, so a token attends to the range from the start of its document to itself.
        starts_BL = query_tokens_L - positions_BL
        if positions_BL.device.type == "cuda":
            return _block_mask(starts_BL, query_tokens_L, key_tokens_K)
        seen_BLK = (key_tokens_K >= starts_BL[..., None]) & (key_tokens_K <= query_tokens_L[:, None])
        return seen_BLK[:, None]


def _document_lengths(positions_BL: Tensor) -> list[int] | None:
    starts_BL = positions_BL == 0
    starts_BL[:, 0] = True
    starts = starts_BL.flatten().nonzero().flatten()
    ends = torch.cat((starts[1:], starts.new_tensor([starts_BL.numel()])))
    lengths: list[int] = (ends - starts).tolist()
    return None if len(lengths) == positions_BL.shape[0] else lengths


def _block_mask(starts_BL: Tensor, query_tokens_L: Tensor, key_tokens_K: Tensor) -> AttentionMask:
    def in_document_and_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (key_tokens_K[k] >= starts_BL[b, q]) & (key_tokens_K[k] <= query_tokens_L[q])

    samples, length = starts_BL.shape
    return _compiled("create_block_mask")(
        in_document_and_causal, samples, None, length, len(key_tokens_K), device=str(starts_BL.device)
    )


class Attention(nn.Module):
    """Scaled dot-product attention. It has no weights, and is a module so that hooks can be attached."""

    def forward(self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, mask: AttentionMask) -> Tensor:
        """Attend H query heads to K key/value heads (K divides H): (B, L, heads, head_dim) → (B, L, H, head_dim)."""
        if isinstance(mask, list):
            return _attend_each_document(q_BLHD, k_BLKD, v_BLKD, mask)
        q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLKD, v_BLKD))
        if mask is None:
            out_BHLD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        elif isinstance(mask, Tensor):
            out_BHLD = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        else:
            out_BHLD = _compiled("flex_attention")(q, k, v, block_mask=mask, enable_gqa=True)
        return out_BHLD.transpose(1, 2)


def _attend_each_document(q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, lengths: list[int]) -> Tensor:
    """Attend within each document. On a CPU, this is faster than any mask, because masked scores are not computed."""

    def split_documents(x_BLHD: Tensor) -> tuple[Tensor, ...]:
        flat_1HTD = x_BLHD.reshape(1, -1, *x_BLHD.shape[2:]).transpose(1, 2)
        return flat_1HTD.split(lengths, dim=2)

    documents = zip(*map(split_documents, (q_BLHD, k_BLKD, v_BLKD)), strict=True)
    outs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in documents]
    return torch.cat(outs, dim=2).transpose(1, 2).reshape(q_BLHD.shape)


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

    def forward(self, x_BLD: Tensor, rope: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        # -1, because a rank holds only some of the heads under tensor parallelism.
        q_BLHD, k_BLKD, v_BLKD = (
            projection(x_BLD).unflatten(-1, (-1, self.head_dim)) for projection in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BLHD, k_BLKD = self.q_norm(q_BLHD), self.k_norm(k_BLKD)
        out_BLHD = self.attend(apply_rope(q_BLHD, rope), apply_rope(k_BLKD, rope), v_BLKD, mask)
        return self.wo(out_BLHD.flatten(-2))

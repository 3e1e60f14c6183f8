"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245), causal within packed documents
and windows."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.common.attention_scores import (
    largest_scores,
    reason_not_to_scale,
    rows_of,
)
from torchtitan.models.common.block_attention import (
    BlockKernel,
    Flash,
    Recomputed,
    attend_in_blocks,
)
from torchtitan.models.common.cpu_attention import on_cpu
from torchtitan.models.common.feed_forward import make_linear
from torchtitan.models.common.norms import NormFactory
from torchtitan.models.common.rope import apply_rope
from torchtitan.protocols.attention import AttentionMetadata, Kernel, ScaledScores
from torchtitan.protocols.initializer import Constant, with_initializers
from torchtitan.protocols.sharding import with_features
from torchtitan.tools.device import send


def choose_kernel(
    attention: AttentionMetadata,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    static: bool,
    capped: bool = False,
) -> Kernel:
    """Return the fastest attention kernel that supports a batch.

    Args:
        dtype: type of queries, keys and values.
        capped: scores have a soft cap, or sinks.
        static: compiled code calls the kernel and specializes on shapes, so they must not depend
            on the documents.
    """
    is_cuda = device.type == "cuda" and head_dim >= 16  # the least width of FlexAttention
    if attention.kernel is not None:
        return attention.kernel
    if attention.key_places_S is not None:
        return "flex" if is_cuda else "dense"  # a rank's queries are at several places
    one_per_row = attention.positions_BL is None or (
        not static and len(attention.lengths) == attention.n_rows
    )
    is_cut = attention.window is not None and attention.window < attention.max_seqlen
    if one_per_row and not is_cut and not (capped and is_cuda):
        return "causal"
    if not is_cuda:
        # Skips scores between documents, since it needs no mask. No other PyTorch kernel does here.
        if static:
            return "dense"
        return "causal" if one_per_row else "documents"
    # `varlen_attn` uses FlashAttention 2, which supports these.
    is_supported = (
        dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and not capped
    )
    is_new = torch.cuda.get_device_capability(device) >= (8, 0)
    return "varlen" if is_supported and is_new and not static else "flex"


def with_kernel(
    attention: AttentionMetadata,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    static: bool,
    capped: bool = False,
) -> AttentionMetadata:
    """Add the kernel that `choose_kernel` returns for these arguments, and its input. Runs once per
    batch and window, not in each layer, outside compiled and checkpointed code."""
    kernel = choose_kernel(
        attention, device=device, dtype=dtype, head_dim=head_dim, static=static, capped=capped
    )
    mask: object = None
    if kernel == "varlen":
        mask = send(attention.cu_seqlens, device)
    elif kernel == "dense" and attention.sees_all and device.type == "cpu" and not capped:
        pass  # each layer would convert and add the mask
    elif kernel == "dense":
        mask = seen_keys(attention, device)[:, None]
    elif kernel == "flex":
        starts_BL, queries_L, keys_S = _seen_ranges(attention, device)
        mask = _block_mask(starts_BL.expand(attention.n_rows, -1), queries_L, keys_S)
    return replace(attention, kernel=kernel, mask=mask)


def seen_keys(attention: AttentionMetadata, device: torch.device) -> Tensor:
    """Return which keys each token sees, (B or 1, L, S)."""
    starts_BL, queries_L, keys_S = _seen_ranges(attention, device)
    return (keys_S >= starts_BL[..., None]) & (keys_S <= queries_L[:, None])


def _seen_ranges(
    attention: AttentionMetadata, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first place that each token sees, (B or 1, L), the place of each token, (L,), and
    the places of all keys, (S,). Documents are contiguous, so a token sees every place from the
    first one to its own."""
    positions_BL = attention.positions_BL
    queries_L = attention.query_places_L
    keys_S = attention.key_places_S
    if queries_L is None or keys_S is None:
        length = attention.max_seqlen if positions_BL is None else positions_BL.shape[1]
        queries_L = keys_S = torch.arange(length, device=device)
    starts_BL = (
        torch.zeros_like(queries_L)[None] if positions_BL is None else queries_L - positions_BL
    )
    if attention.window is not None:
        starts_BL = torch.maximum(starts_BL, queries_L - (attention.window - 1))
    return starts_BL, queries_L, keys_S


def _block_mask(starts_BL: Tensor, queries_L: Tensor, keys_S: Tensor) -> Any:
    def is_seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (keys_S[k] >= starts_BL[b, q]) & (keys_S[k] <= queries_L[q])

    rows, length = starts_BL.shape
    return _compiled("create_block_mask")(
        is_seen, rows, None, length, len(keys_S), device=str(starts_BL.device)
    )


class Attention(nn.Module):
    """Scaled dot-product attention. It has no weights; it is a module so that hooks can attach to
    it.

    Args:
        scale: factor of scores; None: 1 / sqrt(head_dim).
        softcap: bound c of the scaled scores s, which become `c tanh(s / c)` (Gemma 2,
            arXiv:2408.00118).
        has_sinks: queries are from `Sinks`.
    """

    def __init__(
        self, *, scale: float | None = None, softcap: float | None = None, has_sinks: bool = False
    ):
        super().__init__()
        assert not (softcap and has_sinks), "no kernel has both"
        self.scale = scale
        self.softcap = softcap
        self.has_sinks = has_sinks
        self.records_peaks = False
        self.peaks_H: Tensor | None = None
        products = _attend if softcap is None else partial(_capped_attention, softcap=softcap)
        self._products = partial(
            _attend_with_sinks if has_sinks else products, scale=scale, enable_gqa=True
        )

    def forward(
        self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, attention: AttentionMetadata
    ) -> Tensor:
        """Attend H query heads to K key/value heads (K divides H): (B, L, heads, head_dim) → (B, L,
        H, head_dim). If values are narrower than keys, so is the result."""
        if padding := k_BLKD.shape[-1] - v_BLKD.shape[-1]:  # the fast kernels need equal widths
            return Attention.forward(self, q_BLHD, k_BLKD, F.pad(v_BLKD, (0, padding)), attention)[
                ..., :-padding
            ]
        if self.records_peaks and torch.is_grad_enabled():
            self._record_peaks(q_BLHD, k_BLKD, attention)
        if attention.kernel in ("causal", "documents") and on_cpu(q_BLHD):
            return self._attend_in_blocks(q_BLHD, k_BLKD, v_BLKD, attention)
        if attention.kernel == "documents":
            return _attend_each_document(self._products, q_BLHD, k_BLKD, v_BLKD, attention)
        if attention.kernel == "varlen":
            return _attend_varlen(q_BLHD, k_BLKD, v_BLKD, attention, self.scale)
        q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLKD, v_BLKD))
        if attention.kernel == "causal":
            out_BHLD = _attend_causally(self._products, q, k, v, attention.window)
        elif attention.kernel == "dense":
            out_BHLD = self._products(q, k, v, attn_mask=attention.mask)
        else:
            assert attention.kernel == "flex", "with_kernel must choose a kernel first"
            options = {"block_mask": attention.mask, "scale": self.scale, "enable_gqa": True}
            if self.has_sinks:
                from torch.nn.attention.flex_attention import AuxRequest

                attended = _compiled("flex_attention")(
                    q[..., :-1], k, v, return_aux=AuxRequest(lse=True), **options
                )
                out_BHLD = (
                    attended[0] * torch.sigmoid(attended[1].lse - q[..., -1])[..., None]
                ).type_as(v)
            else:
                score_mod = None if self.softcap is None else _soft_cap(self.softcap)
                out_BHLD = _compiled("flex_attention")(q, k, v, score_mod=score_mod, **options)
        return out_BHLD.transpose(1, 2)

    def _attend_in_blocks(
        self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, attention: AttentionMetadata
    ) -> Tensor:
        scale = k_BLKD.shape[-1] ** -0.5 if self.scale is None else self.scale
        kernel: BlockKernel = Flash(scale)
        sinks_BLH = None
        if self.softcap is not None:
            kernel = Recomputed(self._products)
        if self.has_sinks:
            q_BLHD, sinks_BLH = q_BLHD[..., :-1], q_BLHD[..., -1]
        is_packed = attention.kernel == "documents"
        lengths = attention.lengths if is_packed else [q_BLHD.shape[1]]
        return attend_in_blocks(
            kernel, q_BLHD, k_BLKD, v_BLKD, lengths, attention.window, sinks_BLH
        )

    @torch.no_grad()
    def _record_peaks(self, q_BLHD: Tensor, k_BLKD: Tensor, attention: AttentionMetadata) -> None:
        """Add the largest score of each head to `peaks_H`, before a soft cap and without sinks."""
        head_dim = k_BLKD.shape[-1]
        scale = head_dim**-0.5 if self.scale is None else self.scale
        ranges = _seen_ranges(attention, q_BLHD.device)
        peaks_H = scale * largest_scores(q_BLHD[..., :head_dim], k_BLKD, *ranges)
        # Also of the first ones, since a recomputation must call the same operations.
        self.peaks_H = torch.maximum(peaks_H if self.peaks_H is None else self.peaks_H, peaks_H)


class GivingAttention(Attention):
    """Attention that also returns its keys and values, including other ranks' and cached ones."""

    def forward(
        self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, attention: AttentionMetadata
    ) -> Any:
        return super().forward(q_BLHD, k_BLKD, v_BLKD, attention), k_BLKD, v_BLKD


class TemperedAttention(Attention):
    """Attention whose queries grow with the logarithm of the position (Llama 4, after
    arXiv:2501.19399), counted from `first`."""

    def __init__(
        self, floor_scale: int, attn_scale: float, *, first: int = 1, scale: float | None = None
    ):
        super().__init__(scale=scale)
        self.floor_scale, self.attn_scale = floor_scale, attn_scale
        self.first = first

    def forward(
        self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, attention: AttentionMetadata
    ) -> Tensor:
        positions_BL = attention.positions_BL
        if positions_BL is None:
            positions_BL = torch.arange(q_BLHD.shape[1], device=q_BLHD.device)[None]
        n_steps_BL = (positions_BL + self.first) // self.floor_scale
        factor_BL = 1 + self.attn_scale * torch.log1p(n_steps_BL)
        return super().forward(
            (q_BLHD * factor_BL[..., None, None]).type_as(q_BLHD), k_BLKD, v_BLKD, attention
        )


Products = Callable[..., Tensor]
"""The arguments and result of `scaled_dot_product_attention`, from (B, heads, L, head_dim)."""


def _attend(
    q_BHLD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, scale: float | None, **options: Any
) -> Tensor:
    if q_BHLD.shape[2] == 1 and "attn_mask" in options and on_cpu(q_BHLD):
        # The only query of each head of a group sees the same keys: as queries of one head, they
        # read them once.
        q_BKGD = q_BHLD[:, :, 0].unflatten(1, (k_BKSD.shape[1], -1))
        mask = options["attn_mask"]
        out_BKGD = F.scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD, mask, scale=scale)
        return out_BKGD.flatten(1, 2)[:, :, None]
    return F.scaled_dot_product_attention(q_BHLD, k_BKSD, v_BKSD, scale=scale, **options)


def _capped_attention(
    q_BHLD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    softcap: float,
    scale: float | None,
    **options: Any,
) -> Tensor:
    """Attend with soft-capped scores, all in memory: PyTorch's kernels have no cap, and
    FlexAttention has no backward pass on CPUs."""
    n_kv_heads, head_dim = k_BKSD.shape[1], q_BHLD.shape[-1]
    q_BKGLD = q_BHLD.unflatten(1, (n_kv_heads, -1))
    scores = (q_BKGLD @ k_BKSD[:, :, None].mT) * (head_dim**-0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    attn_mask = options.get("attn_mask")
    if attn_mask is None:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    # A mask has no dimension of heads, or one of size 1, which the dimension of groups extends.
    mask = attn_mask if attn_mask.ndim == 2 else attn_mask[:, :, None]
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=wide).type_as(v_BKSD)
    return (weights @ v_BKSD[:, :, None]).flatten(1, 2)


def _attend_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attend to one more key, first and without a value, whose score is the query's last
    element."""
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    k, v = (F.pad(x, (0, 1, 1, 0)) for x in (k, v))
    k[:, :, 0, -1] = 1 / scale
    if attn_mask is not None:
        mask = F.pad(attn_mask, (1, 0), value=True)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, **options)[..., :-1]
    # Prepending a query as well keeps the other queries aligned with the keys that they see.
    return F.scaled_dot_product_attention(F.pad(q, (0, 0, 1, 0)), k, v, scale=scale, **options)[
        :, :, 1:, :-1
    ]


@functools.cache
def _soft_cap(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _attend_causally(
    products: Products, q_BHLD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, window: int | None
) -> Tensor:
    """Attend within rows of one document each. With a window of W tokens, each block of W queries
    takes the 2 W - 1 keys that it sees, so that the cost grows with L W, not with L squared."""
    length = q_BHLD.shape[2]
    if window is None or window >= length:
        return products(q_BHLD, k_BKLD, v_BKLD, is_causal=True)
    seen_WS = q_BHLD.new_ones(window, 2 * window - 1, dtype=torch.bool).triu().tril(window - 1)
    outs = []
    for start in range(0, length, window):
        end, earliest = min(start + window, length), start - window + 1
        first = max(0, earliest)
        q = q_BHLD[:, :, start:end]
        k = k_BKLD[:, :, first:end]
        v = v_BKLD[:, :, first:end]
        mask = seen_WS[: end - start, first - earliest : end - earliest]
        outs.append(products(q, k, v, attn_mask=mask))
    return torch.cat(outs, dim=2)


def _attend_each_document(
    products: Products, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, attention: AttentionMetadata
) -> Tensor:
    def split_documents(x_BLHD: Tensor) -> tuple[Tensor, ...]:
        flat_1HTD = x_BLHD.reshape(1, -1, *x_BLHD.shape[2:]).transpose(1, 2)
        return flat_1HTD.split(attention.lengths, dim=2)

    documents = zip(*map(split_documents, (q_BLHD, k_BLKD, v_BLKD)), strict=True)
    outs = [_attend_causally(products, q, k, v, attention.window) for q, k, v in documents]
    return torch.cat(outs, dim=2).transpose(1, 2).reshape(*q_BLHD.shape[:3], -1)


def _attend_varlen(
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    attention: AttentionMetadata,
    scale: float | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x.flatten(0, 1) for x in (q_BLHD, k_BLKD, v_BLKD))
    # PyTorch counts the tokens before a token's own, -1 for all, and after it.
    window_size = (-1 if attention.window is None else attention.window - 1, 0)
    ends, longest = attention.mask, attention.max_seqlen
    out_THD = varlen_attn(
        q, k, v, ends, ends, longest, longest, window_size=window_size, enable_gqa=True, scale=scale
    )
    assert isinstance(out_THD, Tensor)
    return out_THD.view_as(q_BLHD)


@functools.cache
def _compiled(name: str) -> Any:
    """Compile a function of FlexAttention, which uncompiled would hold scores of all token pairs in
    memory."""
    import torch.nn.attention.flex_attention as flex_attention

    return torch.compile(getattr(flex_attention, name))


class Sinks(nn.Module):
    """A learned score per head that takes part in the softmax without a token (gpt-oss), stored as
    one more element of the head's queries."""

    def __init__(self, n_heads: int):
        super().__init__()
        self.scores = nn.Parameter(torch.empty(n_heads))
        with_features(with_initializers(self, scores=Constant(0.0)), scores=("out",))

    def forward(self, q_BLHD: Tensor) -> Tensor:
        """(B, L, H, head_dim) → (B, L, H, head_dim + 1)."""
        scores_BLH1 = self.scores.type_as(q_BLHD)[:, None].expand(*q_BLHD.shape[:-1], 1)
        return torch.cat((q_BLHD, scores_BLH1), dim=-1)


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """Sizes of attention."""

    dim: int
    """Width of the model."""

    n_heads: int
    """Query heads."""

    n_kv_heads: int
    """Key/value heads; divides n_heads."""

    head_dim: int
    """Width of one head."""

    @property
    def q_width(self) -> int:
        """Width of all query heads."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads, or of all value heads."""
        return self.n_kv_heads * self.head_dim


class GroupedQueryAttention(ScaledScores):
    """Causal self-attention with fewer key/value heads than query heads.

    Args:
        attend: scores and their products with values. With `has_sinks`, `Sinks` are added.
        biases: the projections with a bias, some of "qkvo".
        qk_norm: makes the norms of each head's queries and keys before RoPE; None: no norms.
        qk_wide_norm: makes the norms of all heads' queries, and of all keys; None: no norms.
        v_norm: makes the norm of each head's values; None: no norm.
        keys_as_values: the values are the keys before norm and RoPE; `wv` is None.
        rotates_first: the norms of each head's queries and keys follow RoPE.
        gated: multiply the result by the sigmoid of gates, which follow the queries of each head in
            `wq`.
        init_std: standard deviation of the initial input projections.
        out_init_std: standard deviation of the initial output projection.
    """

    def __init__(
        self,
        sizes: HeadSizes,
        attend: Attention,
        *,
        biases: str = "",
        qk_norm: NormFactory | None = None,
        qk_wide_norm: NormFactory | None = None,
        v_norm: NormFactory | None = None,
        keys_as_values: bool = False,
        rotates_first: bool = False,
        gated: bool = False,
        init_std: float,
        out_init_std: float,
    ):
        super().__init__()
        dim, head_dim = sizes.dim, sizes.head_dim
        q_width, kv_width = sizes.q_width, sizes.kv_width
        self.head_dim, self.gated = head_dim, gated
        self.rotates_first = rotates_first
        self.attend = attend
        self.sinks = Sinks(sizes.n_heads) if attend.has_sinks else None
        self.wq = make_linear(dim, 2 * q_width if gated else q_width, init_std, bias="q" in biases)
        self.wk = make_linear(dim, kv_width, init_std, bias="k" in biases)
        self.wv = (
            None if keys_as_values else make_linear(dim, kv_width, init_std, bias="v" in biases)
        )
        self.q_norm = _make_norm(qk_norm, head_dim)
        self.k_norm = _make_norm(qk_norm, head_dim)
        self.q_wide_norm = _make_norm(qk_wide_norm, q_width)
        self.k_wide_norm = _make_norm(qk_wide_norm, kv_width)
        self.v_norm = _make_norm(v_norm, head_dim)
        self.wo = make_linear(q_width, dim, out_init_std, bias="o" in biases)

    def forward(
        self, x_BLD: Tensor, rope: tuple[Tensor, Tensor] | None, attention: AttentionMetadata
    ) -> Any:
        """(B, L, dim) → (B, L, dim), and keys and values from a `GivingAttention`. Without `rope`,
        queries and keys have no positions."""
        q_BLE, k_BLE = self.wq(x_BLD), self.wk(x_BLD)
        v_BLE = k_BLE if self.wv is None else self.wv(x_BLD)
        if self.gated:
            q_BLE, gate_BLE = (
                x.flatten(-2) for x in q_BLE.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
            )
        if self.q_wide_norm is not None and self.k_wide_norm is not None:
            q_BLE, k_BLE = self.q_wide_norm(q_BLE), self.k_wide_norm(k_BLE)
        # -1, because a rank holds only some of the heads under tensor parallelism.
        q_BLHD, k_BLKD, v_BLKD = (
            x.unflatten(-1, (-1, self.head_dim)) for x in (q_BLE, k_BLE, v_BLE)
        )
        if rope is not None and self.rotates_first:
            q_BLHD, k_BLKD = _rotated(q_BLHD, k_BLKD, rope)
        if self.q_norm is not None and self.k_norm is not None:
            q_BLHD, k_BLKD = self.q_norm(q_BLHD), self.k_norm(k_BLKD)
        if self.v_norm is not None:
            v_BLKD = self.v_norm(v_BLKD)
        if rope is not None and not self.rotates_first:
            q_BLHD, k_BLKD = _rotated(q_BLHD, k_BLKD, rope)
        if self.sinks is not None:
            q_BLHD = self.sinks(q_BLHD)
        attended = self.attend(q_BLHD, k_BLKD, v_BLKD, attention)
        out_BLHD, *given = attended if isinstance(attended, tuple) else (attended,)
        out_BLE = out_BLHD.flatten(-2)
        if self.gated:
            out_BLE = out_BLE * torch.sigmoid(gate_BLE)
        return (self.wo(out_BLE), *given) if given else self.wo(out_BLE)

    @property
    def scores(self) -> Any:
        return self.attend

    @property
    def n_heads(self) -> int:
        return self.wo.in_features // self.head_dim

    def reason_not_to_scale(self) -> str:
        if self.q_norm is not None or self.q_wide_norm is not None:
            return "norms of queries and keys follow the projections"
        return reason_not_to_scale(self.wq, *([] if self._shares_keys else [self.wk]))

    @property
    def _shares_keys(self) -> bool:
        """True if something else needs the keys of a head as they are: other heads, or values."""
        return self.wv is None or self.wk.out_features < self.wo.in_features

    def rows_of_scores(self, factor_H: Tensor) -> list[tuple[Tensor, Tensor]]:
        factor_H = factor_H if self._shares_keys else factor_H.sqrt()
        q_HD = factor_H[:, None].expand(-1, self.head_dim)
        k_rows = [] if self._shares_keys else rows_of(self.wk, q_HD.flatten())
        if self.gated:
            q_HD = torch.cat((q_HD, torch.ones_like(q_HD)), dim=1)
        return [*rows_of(self.wq, q_HD.flatten()), *k_rows]


def _rotated(q_BLHD: Tensor, k_BLKD: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Apply the position embedding to queries and keys."""
    if q_BLHD.shape[1] > 1 or not on_cpu(q_BLHD):
        return apply_rope(q_BLHD, rope), apply_rope(k_BLKD, rope)
    # Of single tokens, calls take more time than copies.
    n_heads = q_BLHD.shape[2]
    both = apply_rope(torch.cat((q_BLHD, k_BLKD), dim=2), rope)
    return both[:, :, :n_heads], both[:, :, n_heads:]


def _make_norm(norm: NormFactory | None, width: int) -> nn.Module | None:
    return None if norm is None else norm(width)


class AttentionOptions(TypedDict, total=False):
    """Options of a decoder's `make_attention`: the class of the attention, its scores, and what
    else `GroupedQueryAttention` takes."""

    kind: type[nn.Module]
    attend: Attention | None
    """Computes scores and their products; None: `Attention` with this `scale`."""
    scale: float | None
    biases: str
    qk_norm: NormFactory | None
    qk_wide_norm: NormFactory | None
    v_norm: NormFactory | None
    keys_as_values: bool
    rotates_first: bool
    gated: bool
    init_std: float
    out_init_std: float


class SharedKeyAttention(GroupedQueryAttention):
    """Attention of a layer's own queries to the keys and values of an earlier layer (Gemma 3n,
    4)."""

    def __init__(self, *parts: Any, **options: Any):
        super().__init__(*parts, **options)
        # Not `attend`, which gathers keys and caches them: the earlier layer has done both.
        self.own_scores = self.attend
        for name in ("attend", "wk", "wv", "k_norm", "v_norm"):
            setattr(self, name, None)

    @property
    def scores(self) -> Any:
        return self.own_scores

    def reason_not_to_scale(self) -> str:
        return "an earlier layer has its keys"

    def forward(
        self, x_BLD: Tensor, rope: Any, attention: AttentionMetadata, *shared_BSKD: Tensor
    ) -> Any:
        """(B, L, dim) → (B, L, dim). `shared_BSKD`: keys and values, with the layer's `rope` and
        window."""
        q_BLHD = self.wq(x_BLD).unflatten(-1, (-1, self.head_dim))
        q_BLHD = apply_rope(q_BLHD if self.q_norm is None else self.q_norm(q_BLHD), rope)
        return self.wo(self.own_scores(q_BLHD, *shared_BSKD, attention).flatten(-2))

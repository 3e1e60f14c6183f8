"""Attention of packed documents on a CPU, computed by blocks: a whole document, or the part of it
whose tokens see about the same window.

A block's results and gradients are written to their places as soon as they are known, so its
temporary tensors stay in the cache, and memory grows with the number of tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchtitan.models.common import cpu_attention
from torchtitan.tools.autograd import Context
from torchtitan.tools.torch_private import cpu_attention_gradients, cpu_attention_products

_FEWEST_QUERIES, _MOST_QUERIES = 64, 512
"""Tokens of a block within a window. A block computes scores of its tokens with each other that the
window hides, so it has a quarter of the window's tokens, within these limits: fewer make slow
products, and the scores of more leave the cache."""


class Block(NamedTuple):
    """The tokens from `start` to before `end`, which see keys from `first` on."""

    start: int
    end: int
    first: int

    @property
    def queries(self) -> slice:
        return slice(self.start, self.end)

    @property
    def keys(self) -> slice:
        return slice(self.first, self.end)

    @property
    def n_earlier(self) -> int:
        """Number of keys before the block's own tokens."""
        return self.start - self.first


def blocks_of(
    lengths: Sequence[int], window: int | None, most_queries: int | None = None
) -> list[Block]:
    """Return blocks of documents of these lengths, in order, that each have at most `most_queries`
    tokens (None: as many as possible)."""
    blocks: list[Block] = []
    end = 0
    for length in lengths:
        first, end = end, end + length
        start = first
        while start < end:
            n_queries = _queries(length if window is None else window, seen=start - first)
            stop = min(end, start + min(n_queries, most_queries or n_queries))
            earliest = first if window is None else start - window + 1
            blocks.append(Block(start, stop, max(first, earliest)))
            start = stop
    return blocks


def _queries(window: int, *, seen: int) -> int:
    """Return the tokens of the next block of a document of which `seen` tokens are in others."""
    if seen < window:
        return window - seen  # they see all before them
    return min(max(window // 4, _FEWEST_QUERIES), _MOST_QUERIES)


Inputs = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, (B, heads, tokens, head_dim)."""


class BlockKernel(Protocol):
    """Attention of one block, from (B, heads, tokens, head_dim)."""

    @property
    def most_queries(self) -> int | None:
        """Largest number of tokens of a block; None: any."""

    def results(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the results, and the log-sum-exp of each query's scores if `gradients` needs it.
        Without a `mask` of the scores, 0 or -inf, attention is causal."""

    def gradients(
        self, grad: Tensor, inputs: Inputs, out: Tensor, lse: Tensor | None, mask: Tensor | None
    ) -> Sequence[Tensor]:
        """Return the gradients of queries, keys and values."""


@dataclass(frozen=True)
class Flash:
    """PyTorch's kernel; without a mask in bfloat16, batched products where these are fast."""

    scale: float
    most_queries: int | None = None

    def results(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if mask is None and cpu_attention.supports(q):
            return cpu_attention.causal_products(q, k, v, self.scale)
        return cpu_attention_products(q, k, v, mask, self.scale)

    def gradients(
        self, grad: Tensor, inputs: Inputs, out: Tensor, lse: Tensor | None, mask: Tensor | None
    ) -> Sequence[Tensor]:
        assert lse is not None
        if mask is None and cpu_attention.supports(inputs[0]):
            return cpu_attention.causal_gradients(grad, *inputs, out, lse, self.scale)
        return cpu_attention_gradients(grad, *inputs, out, lse, mask, self.scale)


@dataclass(frozen=True)
class Recomputed:
    """Attention by any `products`, differentiated by autograd, which computes them again."""

    products: Callable[..., Tensor]
    most_queries: int | None = 128

    def results(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self._products(q, k, v, mask), None

    def gradients(
        self, grad: Tensor, inputs: Inputs, out: Tensor, lse: Tensor | None, mask: Tensor | None
    ) -> Sequence[Tensor]:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in inputs)
            return torch.autograd.grad(self._products(q, k, v, mask), (q, k, v), grad)

    def _products(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        options = {"is_causal": True} if mask is None else {"attn_mask": mask == 0}
        out: Tensor = self.products(q, k, v, **options)
        return out


def attend_in_blocks(
    kernel: BlockKernel,
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    lengths: Sequence[int],
    window: int | None,
    sinks_BLH: Tensor | None = None,
) -> Tensor:
    """Attend within documents of these lengths, (B, L, heads, head_dim) → (B, L, H, head_dim). The
    documents are of each row if they have its length together, otherwise of all rows in order.

    Args:
        sinks_BLH: score of one more key of each query, without a value.
    """
    total, (n_rows, length) = sum(lengths), q_BLHD.shape[:2]
    inputs = [q_BLHD, k_BLKD, v_BLKD]
    if total != length:
        assert total == n_rows * length
        inputs = [x.reshape(1, total, *x.shape[2:]) for x in inputs]
        sinks_BLH = None if sinks_BLH is None else sinks_BLH.reshape(1, total, -1)
    heads_first = [x.transpose(1, 2) for x in inputs]
    sinks_BHL = None if sinks_BLH is None else sinks_BLH.transpose(1, 2)
    blocks = blocks_of(lengths, window, kernel.most_queries)
    out_BHLD: Tensor = _BlockAttention.apply(*heads_first, sinks_BHL, kernel, blocks, window)
    return out_BHLD.transpose(1, 2).reshape(q_BLHD.shape)


class _Kept(Context, Protocol):
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]
    kernel: BlockKernel
    blocks: Sequence[Block]
    window: int | None


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_BHL: Tensor | None,
        kernel: BlockKernel,
        blocks: Sequence[Block],
        window: int | None,
    ) -> Tensor:
        masks = _Masks(blocks, window, q)
        out, lse_BHL = _empty_like(q), None
        for block in blocks:
            keys, queries = block.keys, block.queries
            part, lse = kernel.results(
                q[:, :, queries], k[:, :, keys], v[:, :, keys], masks.of(block)
            )
            out[:, :, queries] = part
            if lse is not None:
                lse_BHL = lse.new_empty(q.shape[:3]) if lse_BHL is None else lse_BHL
                lse_BHL[:, :, queries] = lse
        if sinks_BHL is not None:
            assert lse_BHL is not None, "this kernel has no sinks"
            out *= torch.sigmoid(lse_BHL - sinks_BHL)[..., None]
            # Of all keys: with it, the gradients of the others are as without a sink.
            lse_BHL = torch.logaddexp(lse_BHL, sinks_BHL.type_as(lse_BHL))
        ctx.kernel, ctx.blocks = kernel, blocks
        ctx.window = window
        ctx.save_for_backward(q, k, v, sinks_BHL, out, lse_BHL)
        return out

    @staticmethod
    def backward(ctx: _Kept, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_BHL, out, lse_BHL = ctx.saved_tensors
        (grad,) = grad_outputs
        masks = _Masks(ctx.blocks, ctx.window, q)
        is_shared = any(block.n_earlier for block in ctx.blocks)
        # Gradients of keys that several blocks see are sums, in float32.
        dtype = torch.promote_types(q.dtype, torch.float32) if is_shared else q.dtype
        grad_q = _empty_like(q)
        grad_k, grad_v = (_empty_like(x, dtype) for x in (k, v))
        for block in ctx.blocks:
            keys, queries = block.keys, block.queries
            lse = None if lse_BHL is None else lse_BHL[:, :, queries]
            grad_q[:, :, queries], *of_keys = ctx.kernel.gradients(
                grad[:, :, queries],
                (q[:, :, queries], k[:, :, keys], v[:, :, keys]),
                out[:, :, queries],
                lse,
                masks.of(block),
            )
            for total, part in zip((grad_k, grad_v), of_keys, strict=True):
                total[:, :, queries] = part[:, :, block.n_earlier :]
                total[:, :, block.first : block.start] += part[:, :, : block.n_earlier]
        grad_sinks = None
        if sinks_BHL is not None and lse_BHL is not None:
            weights = torch.exp(sinks_BHL - lse_BHL)
            grad_sinks = (-weights * (grad * out).sum(-1)).type_as(sinks_BHL)
        return grad_q, grad_k.type_as(k), grad_v.type_as(v), grad_sinks, None, None, None


def _empty_like(x_BHLD: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory in which the heads of a token are next to each other, as in `x_BHLD`."""
    return torch.empty_like(x_BHLD.transpose(1, 2), dtype=dtype).transpose(1, 2)


class _Masks:
    """Masks of the scores of blocks; None for causal ones."""

    def __init__(self, blocks: Sequence[Block], window: int | None, like: Tensor):
        self._window, self._like = window, like
        self._made: dict[tuple[int, int], Tensor] = {}

    def of(self, block: Block) -> Tensor | None:
        n_queries, n_earlier = block.end - block.start, block.n_earlier
        if n_earlier == 0 and (self._window is None or n_queries <= self._window):
            return None
        key = n_queries, n_earlier
        if key not in self._made:
            shape = n_queries, n_earlier + n_queries
            is_seen = torch.ones(shape, dtype=torch.bool).tril(n_earlier)
            if self._window is not None:
                is_seen.triu_(n_earlier - self._window + 1)
            self._made = {key: self._like.new_zeros(shape).masked_fill_(~is_seen, -torch.inf)}
        return self._made[key]

"""Losses of a linear layer's outputs, a chunk of logits at a time, and cross entropy in closed
form, without autograd.

The gradient of a token's cross entropy for its logits is `softmax(logits) - one_hot(label)`. It
replaces the logits in memory, so a chunk takes two products for the gradients, one for the logits,
and a few passes over cached blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.components.losses.labels import IGNORE_INDEX
from torchtitan.distributed.loss_parallel import VocabularyShard
from torchtitan.protocols.output_head import LogitTransform
from torchtitan.tools.autograd import Context

BLOCK_ELEMENTS = {"cpu": 2**19}
"""Logits in float32 at a time, by type of device. On CPUs, 2 MiB of them stay in the cache."""

_MOST_BLOCK_ELEMENTS = 2**25


BlockLoss = Callable[..., Tensor]
"""See `cross_entropy_`."""


def cross_entropy_(
    logits_NV: Tensor,
    labels_N: Tensor,
    *,
    transform: LogitTransform,
    shard: VocabularyShard | None,
    needs_grad: bool,
    scratch_NV: Tensor | None = None,
) -> Tensor:
    """Return the losses of tokens in float32, and replace `logits_NV` by the gradients of their sum
    if `needs_grad`.

    Args:
        labels_N: ids in the whole vocabulary, or -100 for a loss of 0.
        transform: applied to the logits; the gradients are for the logits before it.
        shard: position of the logits in a sharded vocabulary; None: they cover it.
        scratch_NV: float32 memory for logits of lower precision; None: newly allocated.
    """
    is_float32 = logits_NV.dtype == torch.float32
    if is_float32:
        scores = logits_NV
    elif scratch_NV is None:
        scores = logits_NV.float()
    else:
        scores = scratch_NV.copy_(logits_NV)
    multiplier, softcap = transform.multiplier, transform.softcap
    slope = None
    if softcap is not None:
        tanh = torch.tanh(scores * (multiplier / softcap))
        slope = 1 - tanh**2  # derivative of the cap
        torch.mul(tanh, softcap, out=scores)
    elif multiplier != 1.0:
        scores.mul_(multiplier)
    if transform.temperature != 1.0:
        scores.div_(transform.temperature)
        multiplier /= transform.temperature  # of the gradients
    is_valid_N1 = (labels_N != IGNORE_INDEX)[:, None]
    columns_N1 = labels_N[:, None]
    is_here_N1 = is_valid_N1
    if shard:
        columns_N1 = columns_N1 - shard.first
        is_here_N1 = is_valid_N1 & (columns_N1 >= 0) & (columns_N1 < scores.shape[1])
    columns_N1 = columns_N1.where(is_here_N1, 0)

    # not a product: a score may be infinite
    label_scores_N1 = scores.gather(1, columns_N1).where(is_here_N1, 0)
    peaks_N1 = scores.amax(dim=1, keepdim=True)
    if shard:
        dist.all_reduce(peaks_N1, dist.ReduceOp.MAX, shard.group)
    exponentials = scores.sub_(peaks_N1).exp_()
    sums_N1 = exponentials.sum(dim=1, keepdim=True)
    if shard:
        both = torch.cat((sums_N1, label_scores_N1))
        dist.all_reduce(both, group=shard.group)
        sums_N1, label_scores_N1 = both.chunk(2)
    losses_N1 = (peaks_N1 + sums_N1.log() - label_scores_N1).where(is_valid_N1, 0)
    if needs_grad:
        gradients = exponentials.mul_(multiplier * is_valid_N1 / sums_N1)
        gradients.scatter_add_(1, columns_N1, -multiplier * is_here_N1.float())
        if slope is not None:
            gradients.mul_(slope)
        if not is_float32:
            logits_NV.copy_(gradients)
    return losses_N1.squeeze(1)


OfChunk = Callable[[Tensor, slice], tuple[Tensor, Tensor | None]]
"""(logits (n, V), their rows) → values of the rows (n, …), or their sums (1, …), and the gradients
for the logits, which may replace these in memory; None if they are not needed."""


def chunked_loss(
    hidden_ND: Tensor, weight_VD: Tensor | None, of_chunk: OfChunk, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the sum of the first column of `of_chunk`'s values (n, K), whose gradients it returns,
    and all values, without gradients. The forward pass also computes the gradients, so only one
    chunk's logits are in memory, and nothing is recomputed."""
    if not torch.is_grad_enabled():  # a parameter would need gradients nevertheless
        hidden_ND = hidden_ND.detach()
        weight_VD = None if weight_VD is None else weight_VD.detach()
    loss, values_NK = _ChunkedLoss.apply(hidden_ND, weight_VD, of_chunk, chunk_tokens)
    return loss, values_NK


class _Kept(Context, Protocol):
    saved_tensors: tuple[Tensor | None, Tensor | None]
    weight_dtype: torch.dtype


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept,
        hidden_ND: Tensor,
        weight_VD: Tensor | None,
        of_chunk: OfChunk,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        values_NK, *gradients = over_chunks(
            hidden_ND, weight_VD, of_chunk, chunk_tokens, ctx.needs_input_grad
        )
        ctx.weight_dtype = hidden_ND.dtype if weight_VD is None else weight_VD.dtype
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(values_NK)
        return values_NK[:, 0].sum(), values_NK

    @staticmethod
    def backward(ctx: _Kept, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        grad_hidden, grad_weight = ctx.saved_tensors
        # Not in place, since pipeline schedules with a split backward pass call this twice.
        if grad_hidden is not None:
            grad_hidden = grad_hidden * scale
        if grad_weight is not None:
            grad_weight = torch.mul(
                grad_weight,
                scale,
                out=grad_weight.new_empty(grad_weight.shape, dtype=ctx.weight_dtype),
            )
        return grad_hidden, grad_weight, None, None


def over_chunks(
    hidden_ND: Tensor,
    weight_VD: Tensor | None,
    of_chunk: OfChunk,
    chunk_tokens: int,
    needs_grad: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Call `of_chunk` on the logits `hidden_ND @ weight_VD.T` (without weights, `hidden_ND`) of
    each chunk of tokens. Return the values of all chunks, and the gradients of hidden states and
    weights, as far as `needs_grad` says."""
    n_tokens = len(hidden_ND)
    needs_hidden, needs_weight = needs_grad[:2]
    grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
    grad_weight: Tensor | None = None
    values = []
    for start in range(0, n_tokens or 1, chunk_tokens):  # gradients of 0 without tokens
        part = slice(start, min(start + chunk_tokens, n_tokens))
        hidden = hidden_ND[part]
        logits = hidden if weight_VD is None else hidden @ weight_VD.T
        of_part, gradients = of_chunk(logits, part)
        values.append(of_part)
        if grad_hidden is not None and gradients is not None:
            grad_hidden[part] = gradients if weight_VD is None else gradients @ weight_VD
        if needs_weight and gradients is not None:
            grad_weight = add_product(
                grad_weight, gradients.T, hidden, is_only=n_tokens <= chunk_tokens
            )
        del logits, gradients  # before the next chunk takes memory
    return torch.cat(values), grad_hidden, grad_weight


def labeled_rows(labels_N: Tensor) -> Tensor | None:
    """Return the rows with a label if they are known without waiting (not on a GPU, nor for a fake
    tensor) and some have none; otherwise None."""
    if labels_N.device.type != "cpu" or type(labels_N) is not Tensor:
        return None
    rows = (labels_N != IGNORE_INDEX).nonzero().flatten()
    return None if len(rows) == len(labels_N) else rows


def cross_entropy_in_blocks(
    logits_NV: Tensor, labels_N: Tensor, device_type: str, **options: Any
) -> Tensor:
    """Call `cross_entropy_` on blocks of rows that share their float32 memory, of the size for a
    type of device."""
    # Collectives of shards are best called once per chunk.
    elements = BLOCK_ELEMENTS.get("" if options["shard"] else device_type, _MOST_BLOCK_ELEMENTS)
    n_rows = max(1, elements // logits_NV.shape[1])
    scratch = None
    if logits_NV.dtype != torch.float32:
        scratch = torch.empty_like(logits_NV[:n_rows], dtype=torch.float32)
    return torch.cat(
        [
            cross_entropy_(
                block,
                labels,
                scratch_NV=None if scratch is None else scratch[: len(block)],
                **options,
            )
            for block, labels in zip(logits_NV.split(n_rows), labels_N.split(n_rows), strict=True)
        ]
    )


def add_product(total: Tensor | None, a: Tensor, b: Tensor, *, is_only: bool) -> Tensor:
    """Return `total + a @ b`, in float32 unless it `is_only` one product: a sum in bfloat16 would
    lose small terms."""
    # transposed, since oneDNN copies the first factor; `a` is the larger one
    if a.dtype == torch.float32:
        return (b.T @ a.T).T if total is None else total.T.addmm_(b.T, a.T).T
    if is_only:
        return a @ b
    if a.device.type == "cuda":  # CPUs have no product with another type of result
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return (a @ b).float() if total is None else total.add_(a @ b)

"""Cross entropy of a linear layer's outputs in closed form, a chunk of logits at a time, without autograd.

The gradient of a token's loss for its logits is `softmax(logits) - one_hot(label)`. It replaces the logits in memory,
so a chunk takes two products for the gradients, one for the logits, and a few elementwise passes over cached blocks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.distributed.loss_parallel import VocabularyShard
from torchtitan.protocols.output_head import LogitTransform

IGNORE_INDEX = -100
"""Label of a token that is not predicted."""

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
    """Return the losses of tokens in float32, and replace `logits_NV` by the gradients of their sum if `needs_grad`.

    Args:
        labels_N: ids in the whole vocabulary, or -100 for a loss of 0.
        transform: applied to the logits; the gradients are for the logits before it.
        shard: position of the logits in a sharded vocabulary; None: they cover it.
        scratch_NV: float32 memory for logits of lower precision; None: newly allocated.
    """
    is_float32 = logits_NV.dtype == torch.float32
    scores = logits_NV if is_float32 else logits_NV.float() if scratch_NV is None else scratch_NV.copy_(logits_NV)
    multiplier, softcap = transform.multiplier, transform.softcap
    slope = None
    if softcap is not None:
        tanh = torch.tanh(scores * (multiplier / softcap))
        slope = 1 - tanh**2  # derivative of the cap
        torch.mul(tanh, softcap, out=scores)
    elif multiplier != 1.0:
        scores.mul_(multiplier)
    is_valid_N1 = (labels_N != IGNORE_INDEX)[:, None]
    columns_N1, is_here_N1 = labels_N[:, None], is_valid_N1
    if shard:
        columns_N1 = columns_N1 - shard.first
        is_here_N1 = is_valid_N1 & (columns_N1 >= 0) & (columns_N1 < scores.shape[1])
    columns_N1, is_here_N1 = columns_N1.where(is_here_N1, 0), is_here_N1.float()

    label_scores_N1 = scores.gather(1, columns_N1) * is_here_N1
    peaks_N1 = scores.amax(dim=1, keepdim=True)
    if shard:
        dist.all_reduce(peaks_N1, dist.ReduceOp.MAX, shard.group)
    exponentials = scores.sub_(peaks_N1).exp_()
    sums_N1 = exponentials.sum(dim=1, keepdim=True)
    if shard:
        both = torch.cat((sums_N1, label_scores_N1))
        dist.all_reduce(both, group=shard.group)
        sums_N1, label_scores_N1 = both.chunk(2)
    losses_N1 = (peaks_N1 + sums_N1.log() - label_scores_N1) * is_valid_N1
    if needs_grad:
        gradients = exponentials.mul_(multiplier * is_valid_N1 / sums_N1)
        gradients.scatter_add_(1, columns_N1, -multiplier * is_here_N1)
        if slope is not None:
            gradients.mul_(slope)
        if not is_float32:
            logits_NV.copy_(gradients)
    return losses_N1.squeeze(1)


class LinearCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of the logits `hidden_ND @ weight_VD.T`, and the loss of each token, without gradient. The
    forward pass also computes the gradients, so only one chunk's logits are in memory, and nothing is recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        chunk_tokens: int,
        transform: LogitTransform,
        shard: VocabularyShard | None,
        compiled: BlockLoss | None,
        block_elements: int,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        needs_grad = needs_hidden or needs_weight
        # Tokens without a label need no logits. Other devices would wait for their number, and compiled code
        # would be specialized on it.
        rows = None if compiled else labeled_rows(labels_N)
        hidden, labels = (hidden_ND, labels_N) if rows is None else (hidden_ND[rows], labels_N[rows])
        n_tokens = len(labels)
        losses = torch.empty(n_tokens, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight: Tensor | None = None
        logits_memory = hidden.new_empty(min(chunk_tokens, n_tokens), len(weight_VD))
        for start in range(0, n_tokens, chunk_tokens):
            part = slice(start, min(start + chunk_tokens, n_tokens))
            logits = torch.mm(hidden[part], weight_VD.T, out=logits_memory[: part.stop - start])
            options = {"transform": transform, "shard": shard, "needs_grad": needs_grad}
            if compiled is None:
                losses[part] = cross_entropy_in_blocks(logits, labels[part], block_elements, **options)
            else:  # fuses the passes, and needs no memory in float32
                losses[part] = compiled(logits, labels[part], **options)
            if grad_hidden is not None:
                torch.mm(logits, weight_VD, out=grad_hidden[part])
            if needs_weight:
                grad_weight = add_product(grad_weight, logits.T, hidden[part], is_only=n_tokens <= chunk_tokens)
        if needs_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight_VD)
        if rows is not None:
            losses = losses.new_zeros(len(labels_N)).index_copy_(0, rows, losses)
            if grad_hidden is not None:
                grad_hidden = torch.zeros_like(hidden_ND).index_copy_(0, rows, grad_hidden)
        ctx.weight_dtype = weight_VD.dtype
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return *scaled_gradients(ctx, grad_outputs[0]), None, None, None, None, None, None


def scaled_gradients(ctx: Any, scale: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients saved in `ctx` times `scale`, the second in `ctx.weight_dtype`."""
    grad_hidden, grad_weight = ctx.saved_tensors
    # Not in place, since pipeline schedules with a split backward pass call this twice.
    if grad_hidden is not None:
        grad_hidden = grad_hidden * scale
    if grad_weight is not None:
        grad_weight = torch.mul(grad_weight, scale, out=torch.empty_like(grad_weight, dtype=ctx.weight_dtype))
    return grad_hidden, grad_weight


def labeled_rows(labels_N: Tensor) -> Tensor | None:
    """Return the rows with a label if they are known without waiting (not on a GPU, nor for a fake tensor) and some
    have none; otherwise None."""
    if labels_N.device.type != "cpu" or type(labels_N) is not Tensor:
        return None
    rows = (labels_N != IGNORE_INDEX).nonzero().flatten()
    return None if len(rows) == len(labels_N) else rows


def block_elements(device_type: str, shard: VocabularyShard | None) -> int:
    """Return the number of logits that `cross_entropy_in_blocks` computes in float32 at a time."""
    # Collectives of shards are best called once per chunk.
    return _MOST_BLOCK_ELEMENTS if shard else BLOCK_ELEMENTS.get(device_type, _MOST_BLOCK_ELEMENTS)


def cross_entropy_in_blocks(logits_NV: Tensor, labels_N: Tensor, elements: int, **options: Any) -> Tensor:
    """Call `cross_entropy_` on blocks of rows that share their float32 memory."""
    n_rows = max(1, elements // logits_NV.shape[1])
    scratch = None
    if logits_NV.dtype != torch.float32:
        scratch = torch.empty_like(logits_NV[:n_rows], dtype=torch.float32)
    return torch.cat(
        [
            cross_entropy_(block, labels, scratch_NV=None if scratch is None else scratch[: len(block)], **options)
            for block, labels in zip(logits_NV.split(n_rows), labels_N.split(n_rows), strict=True)
        ]
    )


def add_product(total: Tensor | None, a: Tensor, b: Tensor, *, is_only: bool) -> Tensor:
    """Return `total + a @ b`, in float32 unless it `is_only` one product: a sum in bfloat16 would lose small terms."""
    if is_only:
        return a @ b
    if a.dtype == torch.float32:
        return a @ b if total is None else total.addmm_(a, b)
    if a.device.type == "cuda":  # CPUs have no product with another type of result
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return (a @ b).float() if total is None else total.add_(a @ b)

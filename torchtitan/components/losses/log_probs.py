"""Log-probabilities of single tokens with gradients, without materializing all logits, for the
losses of preference optimization, distillation and reinforcement learning."""

from dataclasses import replace
from typing import Protocol, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.components.losses.cross_entropy import (
    IGNORE_INDEX,
    cross_entropy_in_blocks,
    labeled_rows,
    over_chunks,
)
from torchtitan.distributed.loss_parallel import VocabularyShard, local_shards
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform
from torchtitan.tools.autograd import Context


def token_log_probs(
    hidden_BLD: Tensor,
    weight_VD: Tensor | None,
    labels_BL: Tensor,
    *,
    transform: LogitTransform = UNCHANGED,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    device_type: str | None = None,
) -> Tensor:
    """Return the log-probability of each label, the token after a position, (B, L) in float32; 0
    for label -100. Use it as a model's `head`: arguments are as of `CrossEntropyLoss`. Under tensor
    parallelism, the result is the same plain tensor on all ranks. Logits are divided by
    `temperature`, as in sampling at it.

    Logits of `chunk_tokens` tokens exist at a time. The backward pass recomputes them, so that the
    loss can be any function of the log-probabilities, and no gradient of the output weights is in
    memory before it. `device_type` selects the block sizes; None: the tensors' device type.
    """
    transform = replace(transform, temperature=temperature)
    if weight_VD is None:
        scores_NV = transform(hidden_BLD.float()).flatten(0, 1)
        losses_N = F.cross_entropy(
            scores_NV, labels_BL.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
        )
        return -losses_N.view(labels_BL.shape)
    hidden_BLD, weight_VD, shard = local_shards(hidden_BLD, weight_VD)
    hidden_ND, labels_N = hidden_BLD.flatten(0, 1), labels_BL.flatten()
    rows = labeled_rows(labels_N)
    if rows is not None:
        hidden_ND, labels_N = hidden_ND.index_select(0, rows), labels_N[rows]
    device_type = device_type or hidden_ND.device.type
    options = _Options(device_type=device_type, transform=transform, shard=shard)
    values: Tensor = _TokenLogProbs.apply(hidden_ND, weight_VD, labels_N, chunk_tokens, options)
    if rows is not None:
        values = values.new_zeros(labels_BL.numel()).index_copy(0, rows, values)
    return values.view(labels_BL.shape)


class _Options(TypedDict):
    """Arguments of `cross_entropy_in_blocks`."""

    device_type: str
    transform: LogitTransform
    shard: VocabularyShard | None


class _Kept(Context, Protocol):
    saved_tensors: tuple[Tensor, Tensor, Tensor]
    chunk_tokens: int
    options: _Options


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        chunk_tokens: int,
        options: _Options,
    ) -> Tensor:
        """Return log-probabilities (N,); `options` are of `cross_entropy_in_blocks`."""
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N)
        ctx.chunk_tokens, ctx.options = chunk_tokens, options

        def of_chunk(logits: Tensor, part: slice) -> tuple[Tensor, None]:
            losses = cross_entropy_in_blocks(logits, labels_N[part], needs_grad=False, **options)
            return losses, None

        return -over_chunks(hidden_ND, weight_VD, of_chunk, chunk_tokens, (False, False))[0]

    @staticmethod
    def backward(ctx: _Kept, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, labels_N = ctx.saved_tensors

        def of_chunk(logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            losses = cross_entropy_in_blocks(logits, labels_N[part], needs_grad=True, **ctx.options)
            return losses, logits.mul_(-grad_outputs[0][part, None])

        chunks = over_chunks(hidden_ND, weight_VD, of_chunk, ctx.chunk_tokens, ctx.needs_input_grad)
        _, grad_hidden, grad_weight = chunks
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VD.dtype),
            None,
            None,
            None,
        )

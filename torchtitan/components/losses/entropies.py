"""Entropies of next-token distributions with gradients, without materializing all logits."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchtitan.components.losses.cross_entropy import IGNORE_INDEX
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform


def token_entropies(
    hidden_BLD: Tensor,
    weight_VD: Tensor | None,
    labels_BL: Tensor,
    *,
    transform: LogitTransform = UNCHANGED,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> Tensor:
    """Return the entropy -Σ p log p of each position's next-token distribution in nats, (B, L) in
    float32; 0 for label -100. Use it as a model's `head`, without tensor parallelism: arguments are
    as of `token_log_probs`. The backward pass recomputes the logits of `chunk_tokens` tokens at a
    time."""
    transform = replace(transform, temperature=temperature)
    is_labeled_N = labels_BL.flatten() != IGNORE_INDEX
    hidden_ND = hidden_BLD.flatten(0, 1)[is_labeled_N]

    def of_chunk(hidden: Tensor, weight: Tensor | None) -> Tensor:
        logits = hidden if weight is None else hidden @ weight.T
        log_p = transform(logits.float()).log_softmax(dim=-1)
        # Of a token without probability, 0 is added: the limit of p log p, also in the gradient.
        return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(dim=-1)

    values = [
        checkpoint(of_chunk, hidden, weight_VD, use_reentrant=False)
        for hidden in hidden_ND.split(chunk_tokens)
    ]
    zeros_N = torch.zeros(labels_BL.numel(), device=hidden_ND.device)
    entropies_N = zeros_N.masked_scatter(is_labeled_N, torch.cat(values))
    return entropies_N.view(labels_BL.shape)

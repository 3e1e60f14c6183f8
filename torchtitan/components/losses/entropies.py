"""Log-probabilities and entropies of next-token distributions with gradients, without materializing
all logits."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchtitan.components.losses.cross_entropy import IGNORE_INDEX
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform


def log_probs_and_entropies(
    hidden_BLD: Tensor,
    weight_VD: Tensor | None,
    labels_BL: Tensor,
    *,
    transform: LogitTransform = UNCHANGED,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return the results of `token_log_probs`, and the entropy -Σ p log p of each position's
    next-token distribution in nats, from the same logits: both (B, L) in float32, and 0 for label
    -100. Use it as a model's `head`, without tensor parallelism: arguments are as of
    `token_log_probs`. The backward pass recomputes the logits of `chunk_tokens` tokens at a
    time."""
    transform = replace(transform, temperature=temperature)
    labels_N = labels_BL.flatten()
    is_labeled_N = labels_N != IGNORE_INDEX
    hidden_ND, labels_N = hidden_BLD.flatten(0, 1)[is_labeled_N], labels_N[is_labeled_N]

    def of_chunk(hidden: Tensor, labels: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = hidden if weight is None else hidden @ weight.T
        log_p = transform(logits.float()).log_softmax(dim=-1)
        # Of a token without probability, 0 is added: the limit of p log p, also in the gradient.
        terms = log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)
        return log_p.gather(1, labels[:, None])[:, 0], -terms.sum(dim=-1)

    chunks = zip(hidden_ND.split(chunk_tokens), labels_N.split(chunk_tokens), strict=True)
    parts = [checkpoint(of_chunk, *chunk, weight_VD, use_reentrant=False) for chunk in chunks]
    zeros_N = torch.zeros(labels_BL.numel(), device=hidden_ND.device)
    log_probs_BL, entropies_BL = (
        zeros_N.masked_scatter(is_labeled_N, torch.cat(values)).view(labels_BL.shape)
        for values in zip(*parts, strict=True)
    )
    return log_probs_BL, entropies_BL

"""A critic for proximal policy optimization: values of hidden states, and advantages computed from them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchtitan.components.data.base import Batch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed.process_group import sum_over_ranks
from torchtitan.protocols.initializer import Constant, with_initializers
from torchtitan.protocols.model import SmallModel


class ValueHead(SmallModel):
    """Linear function of the last hidden states (B, L, D) of another model, initially 0."""

    def __init__(self, config: SmallModel.Config):
        super().__init__(config)
        self.output = with_initializers(nn.Linear(config.dim, 1, bias=False), weight=Constant(0.0))

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        """Return the value of each state, (B, L) in float32."""
        return torch.squeeze(self.output(hidden_BLD), -1).float()


def generalized_advantages(rewards_N: Tensor, values_N: Tensor, samples_N: Tensor, decay: float) -> Tensor:
    """Return the advantages (N,) of sampled tokens (GAE, arXiv:1506.02438, equation 16, without discount), float64:
    from the reward of each token's sample, received at its last token, the value of the state before each token, the
    number of each token's sample, whose tokens are neighbors, and λ."""
    advantages, advantage, later, sample = [], 0.0, 0.0, None
    for reward, value, number in zip(*(x.flip(0).tolist() for x in (rewards_N, values_N, samples_N)), strict=True):
        advantage = later - value + decay * advantage if number == sample else reward - value
        later, sample = value, number
        advantages.append(advantage)
    return torch.tensor(advantages, dtype=torch.float64).flip(0)


def estimate_advantages(batches: Sequence[Batch], decay: float) -> None:
    """Replace the `advantages` of batches, which are rewards, with advantages by `old_values`, and add `returns`, the
    targets of the values. The advantages have mean 0 and deviation 1 over the sampled tokens of all ranks."""
    sums = torch.zeros(3, device=batches[0]["labels"].device)
    for batch in batches:
        is_trained = batch["labels"] != IGNORE_INDEX
        rewards, values, samples = (batch[name][is_trained] for name in ("advantages", "old_values", "samples"))
        advantages = generalized_advantages(rewards, values, samples, decay).to(values)
        batch["advantages"] = batch["advantages"].masked_scatter(is_trained, advantages)
        batch["returns"] = batch["old_values"] + batch["advantages"]
        sums += torch.stack([advantages.sum(), advantages.square().sum(), is_trained.sum()])
    sum_over_ranks(sums)
    mean, square = sums[:2] / sums[2].clamp(min=1)
    for batch in batches:
        batch["advantages"] = (batch["advantages"] - mean) / ((square - mean**2).clamp(min=0).sqrt() + 1e-8)

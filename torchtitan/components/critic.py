"""A critic for proximal policy optimization: values of hidden states, and advantages computed from them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchtitan.components.data.base import Batch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed.parallelize import parallelize_model
from torchtitan.distributed.process_group import sum_over_ranks
from torchtitan.protocols import BaseModel, ModelSpec
from torchtitan.protocols.initializer import Constant, with_initializers
from torchtitan.protocols.sharding import ShardingPlan


class ValueHead(BaseModel):
    """Linear function of the last hidden states (B, L, D) of another model, initially 0."""

    def __init__(self, config: BaseModel.Config):
        super().__init__(config)
        self.output = with_initializers(nn.Linear(config.dim, 1, bias=False), weight=Constant(0.0))

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        """Return the value of each state, (B, L) in float32."""
        values: Tensor = self.output(hidden_BLD)[..., 0].float()
        return values

    def blocks(self) -> dict[str, nn.Module]:
        return {}

    def units(self) -> list[nn.Module]:
        return []

    def flops_per_token(self, seq_len: int) -> float:
        return 6.0 * self.output.in_features


def value_head(spec: ModelSpec) -> ModelSpec:
    """Return the specification of a head for the hidden states of a model."""
    return ModelSpec(
        name="value",
        flavor="head",
        module=__name__,
        model=ValueHead.Config(dim=spec.model.dim),
        loss=spec.loss,
        sharding=ShardingPlan({"output": "whole"}, attention=""),
        parallelize=parallelize_model,
    )


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


def estimate_advantages(batches: Sequence[Batch], decay: float, local_addend: Callable[[Tensor], Tensor]) -> None:
    """Replace the `advantages` of batches, which are rewards, with normalized advantages, by `old_values`; and add
    `returns`, the targets of the values. Mean 0 and deviation 1 hold over the batches of all ranks."""
    masks = [batch["labels"] != IGNORE_INDEX for batch in batches]
    found = []
    for batch, mask in zip(batches, masks, strict=True):
        rewards, values, samples = (batch[name][mask] for name in ("advantages", "old_values", "samples"))
        found.append(generalized_advantages(rewards, values, samples, decay).to(values))
        batch["returns"] = batch["old_values"].masked_scatter(mask, found[-1] + values)
    every = torch.cat(found)
    sums = sum_over_ranks(local_addend(torch.stack([every.sum(), every.square().sum(), torch.ones_like(every).sum()])))
    mean, square = sums[:2] / sums[2].clamp(min=1)
    for batch, mask, advantages in zip(batches, masks, found, strict=True):
        normalized = (advantages - mean) / ((square - mean**2).clamp(min=0).sqrt() + 1e-8)
        batch["advantages"] = batch["advantages"].masked_scatter(mask, normalized)

"""Advantages of single tokens, of all batches of a step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.losses.loss import IGNORE_INDEX
from torchtitan.components.losses.policy_loss import generalized_advantages
from torchtitan.distributed.process_group import sum_over_ranks


def estimate_advantages(batches: Sequence[Batch], decay: float) -> None:
    """Replace the `advantages` of batches, which are rewards, with advantages by `old_values`, and
    add `returns`, the targets of the values. A token's own reward is minus its `penalties`, if the
    batch has them. The advantages have mean 0 and deviation 1 over the
    sampled tokens of all ranks, which are computed one after the other: the mean of squares minus
    the square of the mean would cancel."""
    device, every = batches[0]["labels"].device, []
    for batch in batches:
        is_trained = batch["labels"] != IGNORE_INDEX
        rewards, values, samples = (
            batch[name][is_trained] for name in ("advantages", "old_values", "samples")
        )
        penalties = batch["penalties"][is_trained] if "penalties" in batch else None
        advantages = generalized_advantages(rewards, values, samples, decay, penalties)
        every.append(advantages)
        returns = values.to("cpu", torch.float64) + advantages
        batch["returns"] = batch["old_values"].masked_scatter(is_trained, returns.to(values))
    total, number = _sum_over_ranks(
        [torch.cat(every).sum(), torch.tensor(sum(map(len, every)))], device
    )
    mean = total / max(number, 1)
    (squares,) = _sum_over_ranks([(torch.cat(every) - mean).square().sum()], device)
    deviation = (squares / max(number, 1)) ** 0.5
    for batch, advantages in zip(batches, every, strict=True):
        whitened = (advantages - mean) / (deviation + 1e-8)
        is_trained = batch["labels"] != IGNORE_INDEX
        batch["advantages"] = torch.zeros_like(batch["advantages"]).masked_scatter(
            is_trained, whitened.to(batch["advantages"])
        )


def _sum_over_ranks(values: Sequence[Tensor], device: torch.device) -> list[float]:
    """Return the sums of scalars over all ranks, in float64 where the device has it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return sum_over_ranks(torch.stack([value.to(device, dtype) for value in values])).tolist()

"""The trainer of proximal policy optimization, with its critic."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.components.data.base import Batch, images_in
from torchtitan.components.losses.log_probs import token_log_probs
from torchtitan.components.losses.loss import IGNORE_INDEX
from torchtitan.components.losses.policy_loss import generalized_advantages
from torchtitan.distributed.process_group import sum_over_ranks
from torchtitan.experiments.rl.trainer import RLTrainer
from torchtitan.protocols.initializer import Constant, with_initializers
from torchtitan.protocols.model import SmallModel
from torchtitan.protocols.sharding import ShardingPlan
from torchtitan.trainer import RunModel, StepResult


class ValueHead(SmallModel):
    """Linear function of the last hidden states (B, L, D) of another model, initially 0."""

    def __init__(self, config: SmallModel.Config):
        super().__init__(config)
        self.output = with_initializers(nn.Linear(config.dim, 1, bias=False), weight=Constant(0.0))

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        """Return the value of each state, (B, L) in float32."""
        return torch.squeeze(self.output(hidden_BLD), -1).float()


class PPOTrainer(RLTrainer):
    """Estimate the advantage of each token by a linear function of the policy's last hidden states,
    a second model."""

    has_critic = True

    def build_models(self) -> dict[str, RunModel]:
        spec, sharding = self.config.model_spec, ShardingPlan({"output": "whole"}, attention="")
        head = replace(
            spec, flavor="value head", model=ValueHead.Config(dim=spec.model.dim), sharding=sharding
        )
        return {
            **super().build_models(),
            "value": self.build_other_model(head, trained=True, saved=True),
        }

    def update(self, micro_batches: list[Batch]) -> StepResult:
        with torch.no_grad(), self.precision.fixed_weights(), self.mixed_precision():
            for batch in micro_batches:
                batch["old_values"] = self.policy_outputs(batch)[1]
        if micro_batches:
            estimate_advantages(micro_batches, self.config.policy.gae_decay)
        return super().update(micro_batches)

    def policy_outputs(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        def head(
            hidden_BLD: Tensor, weight_VD: Tensor | None, **changes: Any
        ) -> tuple[Tensor, Tensor]:
            return token_log_probs(hidden_BLD, weight_VD, batch["labels"], **changes), self.models[
                "value"
            ](hidden_BLD)

        outputs: tuple[Tensor, Tensor] = self.models["model"](
            batch["input"], batch.get("attention"), head=head, **images_in(batch)
        )
        return outputs


def estimate_advantages(batches: Sequence[Batch], decay: float) -> None:
    """Replace the `advantages` of batches, which are rewards, with advantages by `old_values`, and
    add `returns`, the targets of the values. The advantages have mean 0 and deviation 1 over the
    sampled tokens of all ranks, which are computed one after the other: the mean of squares minus
    the square of the mean would cancel."""
    device, every = batches[0]["labels"].device, []
    for batch in batches:
        is_trained = batch["labels"] != IGNORE_INDEX
        rewards, values, samples = (
            batch[name][is_trained] for name in ("advantages", "old_values", "samples")
        )
        every.append(advantages := generalized_advantages(rewards, values, samples, decay))
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

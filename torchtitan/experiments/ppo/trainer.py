"""The trainer of proximal policy optimization."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchtitan.components.critic import ValueHead, estimate_advantages
from torchtitan.components.data.base import Batch
from torchtitan.components.log_probs import token_log_probs
from torchtitan.experiments.rl.trainer import RLTrainer
from torchtitan.protocols.sharding import ShardingPlan
from torchtitan.trainer import RunModel, StepResult


class PPOTrainer(RLTrainer):
    """Estimate the advantage of each token by a linear function of the policy's last hidden states, a second model."""

    has_critic = True

    def build_models(self) -> dict[str, RunModel]:
        spec, sharding = self.config.model_spec, ShardingPlan({"output": "whole"}, attention="")
        head = replace(spec, flavor="value head", model=ValueHead.Config(dim=spec.model.dim), sharding=sharding)
        return {**super().build_models(), "value": self.build_other_model(head, trained=True, saved=True)}

    def update(self, micro_batches: list[Batch]) -> StepResult:
        with torch.no_grad(), self.precision.fixed_weights(), self.mixed_precision():
            for batch in micro_batches:
                batch["old_values"] = self.policy_outputs(batch)[1]
        if micro_batches:
            estimate_advantages(micro_batches, self.config.policy.gae_decay)
        return super().update(micro_batches)

    def policy_outputs(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        def head(hidden_BLD: Tensor, weight_VD: Tensor | None, **changes: Any) -> tuple[Tensor, Tensor]:
            return token_log_probs(hidden_BLD, weight_VD, batch["labels"], **changes), self.models["value"](hidden_BLD)

        outputs: tuple[Tensor, Tensor] = self.models["model"](batch["input"], batch["attention"], head=head)
        return outputs

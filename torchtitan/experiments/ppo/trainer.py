"""The trainer of proximal policy optimization."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan.components.critic import estimate_advantages, value_head
from torchtitan.components.data.base import Batch
from torchtitan.components.log_probs import token_log_probs
from torchtitan.experiments.rl.trainer import RLTrainer
from torchtitan.trainer import RunModel, StepResult


class PPOTrainer(RLTrainer):
    """Estimate the advantage of each token by a linear function of the policy's last hidden states, a second model."""

    @dataclass(kw_only=True, slots=True)
    class Config(RLTrainer.Config):
        """A whole run of proximal policy optimization."""

        has_critic = True

    def build_models(self) -> dict[str, RunModel]:
        value = self.build_other_model(value_head(self.config.model_spec), trained=True, saved=True)
        return {**super().build_models(), "value": value}

    def update(self, micro_batches: list[Batch]) -> StepResult:
        on_device = [self.post_dataloading_process(batch) for batch in micro_batches]
        with torch.no_grad(), self.precision.fixed_weights(), self.mixed_precision():
            for batch in on_device:
                batch["old_values"] = self.policy_outputs(batch)[1]
        if on_device:
            estimate_advantages(on_device, self.config.policy.gae_decay, self.local_addend)
        return super().update(on_device)

    def policy_outputs(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        hidden: list[Tensor] = []

        def head(hidden_BLD: Tensor, weight_VD: Tensor | None, **changes: Any) -> Tensor:
            hidden.append(hidden_BLD)
            return token_log_probs(hidden_BLD, weight_VD, batch["labels"], **changes)

        log_probs_BL = self.models["model"](batch["input"], batch["attention"], head=head)
        return log_probs_BL, self.models["value"](*hidden)

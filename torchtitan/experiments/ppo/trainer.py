"""The trainer of proximal policy optimization, with its critic."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from torchtitan.experiments.rl.trainer import Head, RLTrainer
from torchtitan.protocols.initializer import Constant, with_initializers
from torchtitan.protocols.model import SmallModel
from torchtitan.protocols.sharding import ShardingPlan
from torchtitan.tools.errors import UserError
from torchtitan.trainer import RunModel


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

    def heads(self) -> dict[str, Head]:
        def values(
            hidden_BLD: Tensor, weight_VD: Tensor | None, *_: object, **__: object
        ) -> Tensor:
            if weight_VD is None:
                raise UserError(
                    "the class of the model computes its logits itself, so the critic has no "
                    "hidden states to read; use --module rl, which needs none"
                )
            result: Tensor = self.models["value"](hidden_BLD)
            return result

        return {**super().heads(), "values": values}

"""The trainer of reward models."""

import re
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from torchtitan.components.data.base import Batch, images_in
from torchtitan.components.data.finetuning.preference import SEQUENCES_PER_SAMPLE, sum_answers
from torchtitan.components.peft import LoRA
from torchtitan.protocols.converter import HEAD
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Return -log sigmoid(chosen - rejected - margin) of rewards (Llama 2, arXiv:2307.09288,
    equation 2)."""
    return -F.logsigmoid(chosen - rejected - margin)


class RewardTrainer(Trainer):
    """Train a model to give chosen answers higher rewards than rejected ones."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A whole run of reward modeling."""

        trains_scores: ClassVar[bool] = True

        def validate(self) -> None:
            for converter in self.model_converters:
                trains_head = isinstance(converter, LoRA.Config) and any(
                    re.search(pattern, HEAD) for pattern in converter.include
                )
                if converter._owner.freezes and not trains_head:
                    raise UserError(
                        "--model_converters would freeze the new head of a reward model; train all "
                        "weights, or use --config reward_lora, which adapts the head too"
                    )
            why = "since the head with one row is not split, and reads whole conversations"
            self.parallelism.require_one(
                "tensor", "context", "pipeline", user="--module reward", why=why
            )

    sequences_per_sample = SEQUENCES_PER_SAMPLE
    measures_named = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch's pairs, and their number."""
        scores_BL1 = self.models["model"](
            batch["input"], batch.get("attention"), head=F.linear, **images_in(batch)
        )
        sequences = batch["sequences"]
        # of an answer; padding counts to the first one
        is_last = sequences != sequences.roll(-1, dims=1)
        chosen, rejected = sum_answers(
            scores_BL1[..., 0].float().where(is_last, 0), sequences
        ).unbind(-1)
        is_pair, margins = sum_answers(is_last.float(), sequences)[..., 0], chosen - rejected
        for name, values in zip(
            self.measures_named, (chosen, rejected, margins, margins > 0), strict=True
        ):
            self.measure(name, (values * is_pair).sum(), is_pair.sum())
        return (
            bradley_terry_loss(chosen, rejected, batch["margins"]) * is_pair
        ).sum(), is_pair.sum()

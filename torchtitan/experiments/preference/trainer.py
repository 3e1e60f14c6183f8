"""The trainers of preference optimization: `PreferenceTrainer` for pairs, `KTOTrainer` for single
answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.preference import (
    SEQUENCES_PER_SAMPLE,
    PreferenceDataLoader,
    sum_answers,
)
from torchtitan.components.losses.loss import IGNORE_INDEX
from torchtitan.components.losses.preference_losses import (
    Answers,
    KTOLoss,
    PreferenceLoss,
    RewardMeasures,
)
from torchtitan.distributed.process_group import sum_over_ranks
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.trainer.reference import ReferenceTrainer

WHY = (
    "since the loss of a pair needs the sums over both answers, which a rank that holds a part of "
    "their tokens or layers does not have"
)
"""Reason to refuse context and pipeline parallelism."""


class PreferenceTrainer(ReferenceTrainer):
    """Train the model to prefer chosen answers to rejected ones."""

    @dataclass(kw_only=True, slots=True)
    class Config(ReferenceTrainer.Config):
        """A whole run of preference optimization."""

        def validate(self) -> None:
            ReferenceTrainer.Config.validate(self)
            if not isinstance(self.chosen_loss, PreferenceLoss.Config | KTOLoss.Config):
                raise UserError("--module preference has its own losses, and takes no other one")
            self.parallelism.require_one("context", "pipeline", user="--module preference", why=WHY)

    config: Config
    loss: Any
    sequences_per_sample = SEQUENCES_PER_SAMPLE
    measures_class = RewardMeasures
    measures_named: tuple[str, ...] = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "kl",
    )

    def __init__(self, config: Config):
        self.needs_reference = config.chosen_loss.needs_reference  # type: ignore[attr-defined]
        super().__init__(config)

    def answers(self, batch: Batch) -> Answers:
        """Return the log-probabilities under model and reference, and the lengths, of all answers,
        (B, W, 2)."""
        reference = self.reference_log_probs(batch)  # first, before the model stores activations
        log_probs_BW = self.log_probs("model", batch)
        sequences_BW = batch["sequences"]
        is_trained_BW = batch["labels"] != IGNORE_INDEX
        lengths = sum_answers(is_trained_BW.float(), sequences_BW)
        if (alpha := self.loss.verbose_weight) < 1:
            is_verbose_BW = beyond_the_shorter(is_trained_BW, sequences_BW, lengths)
            weights_BW = torch.where(is_verbose_BW, alpha, 1.0)
            log_probs_BW = log_probs_BW * weights_BW
            reference = reference * weights_BW if self.needs_reference else reference
        if self.needs_reference:
            reference = sum_answers(reference, sequences_BW)
        return Answers(sum_answers(log_probs_BW, sequences_BW), reference, lengths)

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch's pairs, and their number."""
        answers = self.answers(batch)
        losses, rewards = self.loss(answers)
        chosen, rejected = rewards.unbind(-1)
        is_pair = answers.is_pair
        for name, values in zip(
            self.measures_named, (chosen, rejected, chosen > rejected), strict=False
        ):
            self.measure(name, (values * is_pair).sum(), is_pair.sum())
        if self.needs_reference:
            self.measure("kl", -answers.log_ratios.sum(), answers.lengths.sum())
        return (losses * is_pair).sum(), is_pair.sum()


def beyond_the_shorter(is_trained_BW: Tensor, sequences_BW: Tensor, lengths_BW2: Tensor) -> Tensor:
    """Return whether each token lies beyond the length of the pair's shorter answer, (B, W).
    The sequences follow one another by their numbers."""
    lengths = lengths_BW2.flatten(1)
    before = lengths.cumsum(dim=1) - lengths  # tokens of earlier answers
    order_BW = is_trained_BW.cumsum(dim=1) - before.gather(1, sequences_BW)
    shorter_BW = lengths_BW2.amin(dim=-1).gather(1, sequences_BW // 2)
    return order_BW > shorter_BW


class KTOTrainer(PreferenceTrainer):
    """Train the model on single answers that are desirable or not. The rewards are compared with
    the divergence of the model from the reference, which answers to other prompts of the same
    global batch estimate."""

    @dataclass(kw_only=True, slots=True)
    class Config(PreferenceTrainer.Config):
        """A whole run of KTO."""

        def validate(self) -> None:
            PreferenceTrainer.Config.validate(self)
            if self.reference.kind == "cached":
                raise UserError(
                    "--reference.kind cached has no answers to other prompts, which KTO needs; use "
                    "model"
                )
            if (
                isinstance(self.dataloader, PreferenceDataLoader.Config)
                and self.dataloader.packing == "none"
            ):
                raise UserError(
                    "--dataloader.packing none leaves no answers to other prompts, which KTO needs"
                )

    measures_named = (*PreferenceTrainer.measures_named, "kl_answers")

    kl: Tensor
    """Estimate of the divergence in the current global batch."""

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        micro_batches = super().next_micro_batches(batches)
        self.kl = self.estimate_kl(micro_batches)
        return micro_batches

    def validation_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self.kl = self.estimate_kl([batch])
        return super().validation_sums(batch)

    @torch.no_grad()
    def estimate_kl(self, batches: Sequence[Batch]) -> Tensor:
        """Return the mean log-ratio of answers to other prompts in the batches of all ranks, at
        least 0."""
        total, number, n_answers = torch.zeros(3, device=self.device, dtype=self.statistics_dtype)
        for batch in map(self.post_dataloading_process, batches):
            answers = {
                name: batch[f"mismatched_{name}"]
                for name in ("input", "labels", "attention", "images")
                if f"mismatched_{name}" in batch
            }
            with self.mixed_precision():
                ratios = self.log_probs("model", answers) - self.reference_log_probs(answers)
            self.measure("kl_answers", batch["n_mismatched"].sum(), batch["n_answers"].sum())
            total, number = total + ratios.sum(), number + batch["n_mismatched"].sum()
            n_answers = n_answers + batch["n_answers"].sum()
        total, number, n_answers = sum_over_ranks(torch.stack([total, number, n_answers]))
        # fake tensors have no values
        if self.step == 0 and self.has_data and type(number) is Tensor:
            self._warn_of_answers_left_out(int(number), int(n_answers))
        return (total / number.clamp(min=1)).clamp(min=0).float()

    def _warn_of_answers_left_out(self, number: int, n_answers: int) -> None:
        """Warn if the windows of the first step have too few prompts for the estimate."""
        if not number:
            logger.warning(
                "KTO: no window has answers to two prompts, so z is 0; increase --training.seq_len"
            )
        elif number < n_answers:
            logger.warning(
                "KTO: %d of %d answers of the first step have no answer to another prompt in their "
                "window, and z excludes them (the metric kl_answers is the share of answers in "
                "z); increase --training.seq_len",
                n_answers - number,
                n_answers,
            )

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch's answers, and their number."""
        answers = self.answers(batch)
        losses, rewards = self.loss(answers.log_ratios, self.kl)
        is_answer = answers.lengths > 0
        for side, name in enumerate(("rewards/chosen", "rewards/rejected")):
            self.measure(name, (rewards * is_answer)[..., side].sum(), is_answer[..., side].sum())
        self.measure("kl", self.kl * is_answer.sum(), is_answer.sum())
        return (losses * is_answer).sum(), is_answer.sum()

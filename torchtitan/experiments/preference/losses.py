"""Losses of preference optimization: functions of log-probabilities, without anything of a trainer.

`x` is the margin of a pair, the reward of its chosen answer minus the reward of its rejected answer. The reward of an
answer is beta times the logarithm of pi / pi_ref, its probability under the trained model and under the reference;
methods without a reference leave out pi_ref, and SimPO and ORPO divide the logarithm by the tokens of the answer.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.config import Configurable
from torchtitan.tools.errors import UserError

Kind = Literal["dpo", "cdpo", "robust", "hinge", "ipo", "dpo_normalized", "simpo", "orpo", "cpo"]
WITHOUT_REFERENCE = ("simpo", "orpo", "cpo")
NORMALIZED = ("simpo", "orpo")
SMOOTHED = ("cdpo", "robust")


class Answers(NamedTuple):
    """Answers to prompts, in tensors of one shape."""

    log_probs: Tensor
    """Log-probability under the trained model, summed over the answer's tokens."""
    reference: Tensor
    """The same under the reference; 0 without one."""
    lengths: Tensor
    """Tokens of the answer; 0 if there is none."""

    @property
    def log_ratios(self) -> Tensor:
        """Logarithm of pi / pi_ref."""
        return self.log_probs - self.reference

    @property
    def mean_log_ratios(self) -> Tensor:
        """Logarithm of pi / pi_ref, per token."""
        return self.log_ratios / self.lengths.clamp(min=1)


def dpo_loss(x: Tensor) -> Tensor:
    """Return -log sigmoid(x) (Rafailov et al., arXiv:2305.18290, equation 7)."""
    return -F.logsigmoid(x)


def cdpo_loss(x: Tensor, smoothing: float) -> Tensor:
    """Return DPO's loss if the labels are wrong with probability `smoothing` (Mitchell, "A note on DPO with noisy
    preferences", 2023)."""
    return -(1 - smoothing) * F.logsigmoid(x) - smoothing * F.logsigmoid(-x)


def robust_loss(x: Tensor, smoothing: float) -> Tensor:
    """Return an estimate of DPO's loss on correct labels from labels that are wrong with probability `smoothing`
    (Chowdhury et al., arXiv:2403.00409, equation 12)."""
    return (-(1 - smoothing) * F.logsigmoid(x) + smoothing * F.logsigmoid(-x)) / (1 - 2 * smoothing)


def hinge_loss(x: Tensor) -> Tensor:
    """Return max(0, 1 - x) (Zhao et al., arXiv:2305.10425)."""
    return torch.relu(1 - x)


def ipo_loss(x: Tensor, beta: float) -> Tensor:
    """Return (h - 1 / (2 beta))^2 with h = x / beta (Azar et al., arXiv:2310.12036, equation 17); h is the difference
    of mean log-ratios per token, so that it does not depend on the length of answers."""
    return (x / beta - 1 / (2 * beta)) ** 2


def simpo_loss(x: Tensor, gamma: float) -> Tensor:
    """Return -log sigmoid(x - gamma) (Meng et al., arXiv:2405.14734, equation 6)."""
    return -F.logsigmoid(x - gamma)


def orpo_loss(chosen: Tensor, rejected: Tensor, weight: float) -> Tensor:
    """Return the negative log-likelihood of the chosen answer plus `weight` times -log sigmoid(log odds ratio) (Hong et
    al., arXiv:2403.07691, equations 3 to 7). Both arguments are mean log-probabilities per token, below 0."""
    log_odds = [mean - torch.log(-torch.expm1(mean)) for mean in (chosen, rejected)]
    return -chosen - weight * F.logsigmoid(log_odds[0] - log_odds[1])


def cpo_loss(x: Tensor, chosen: Tensor, weight: float) -> Tensor:
    """Return -log sigmoid(x) minus `weight` times the chosen answer's mean log-probability per token (Xu et al.,
    arXiv:2401.08417, equation 5, with the likelihood per token)."""
    return -F.logsigmoid(x) - weight * chosen


def kto_loss(reward: Tensor, baseline: Tensor | float, is_desirable: Tensor) -> Tensor:
    """Return 1 - value of answers (Ethayarajh et al., arXiv:2402.01306, equation 8), before weights: the value is
    sigmoid(reward - baseline) for a desirable answer, sigmoid(baseline - reward) for another. The `baseline` is beta
    times the divergence of the model from the reference."""
    difference = reward - baseline
    return 1 - torch.sigmoid(torch.where(is_desirable, difference, -difference))


class PreferenceLoss(Configurable):
    """Loss and rewards of pairs."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Loss of pairs."""

        kind: Kind = "dpo"
        """Loss: dpo, cdpo and robust (for wrong labels), hinge, ipo, dpo_normalized (per token); without a reference
        simpo, orpo and cpo."""

        beta: float = 0.1
        """Scale of the rewards; a smaller value lets the model deviate further from the reference."""

        label_smoothing: float = 0.0
        """Probability that a label is wrong, below 0.5, for cdpo and robust."""

        gamma: float = 1.0
        """Target margin of simpo."""

        weight: float = 1.0
        """Weight of the odds ratio in orpo, and of the likelihood in cpo."""

        def validate(self) -> None:
            if not 0 < self.beta < math.inf:
                raise UserError(f"--loss.beta is {self.beta}, but must be above 0")
            if not 0 <= self.label_smoothing < 0.5:
                raise UserError(f"--loss.label_smoothing is {self.label_smoothing}, but must be from 0 to below 0.5")
            if self.label_smoothing and self.kind not in SMOOTHED:
                raise UserError(f"--loss.label_smoothing is of --loss.kind {' and '.join(SMOOTHED)}, not {self.kind}")

        @property
        def needs_reference(self) -> bool:
            return self.kind not in WITHOUT_REFERENCE

    config: Config

    def rewards(self, answers: Answers) -> Tensor:
        """Return the reward of each answer."""
        is_normalized = self.config.kind in NORMALIZED
        return self.config.beta * (answers.mean_log_ratios if is_normalized else answers.log_ratios)

    def __call__(self, chosen: Answers, rejected: Answers) -> Tensor:
        """Return the loss of each pair."""
        config = self.config
        x = self.rewards(chosen) - self.rewards(rejected)
        per_token = config.beta * (chosen.mean_log_ratios - rejected.mean_log_ratios)
        match config.kind:
            case "dpo":
                return dpo_loss(x)
            case "dpo_normalized":
                return dpo_loss(per_token)
            case "cdpo":
                return cdpo_loss(x, config.label_smoothing)
            case "robust":
                return robust_loss(x, config.label_smoothing)
            case "hinge":
                return hinge_loss(x)
            case "ipo":
                return ipo_loss(per_token, config.beta)
            case "simpo":
                return simpo_loss(x, config.gamma)
            case "cpo":
                return cpo_loss(x, chosen.mean_log_ratios, config.weight)
            case "orpo":
                # Any value below 0 in place of a missing answer: 0 would have infinite odds.
                first, second = (side.mean_log_ratios.where(side.lengths > 0, -1.0) for side in (chosen, rejected))
                return orpo_loss(first, second, config.weight)


class KTOLoss(Configurable):
    """Loss of single answers with labels."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Loss of answers."""

        beta: float = 0.1
        """Scale of the rewards; a smaller value lets the model deviate further from the reference."""

        desirable_weight: float = 1.0
        """Weight of desirable answers."""

        undesirable_weight: float = 1.0
        """Weight of undesirable answers."""

        needs_reference = True

        def validate(self) -> None:
            for name in ("beta", "desirable_weight", "undesirable_weight"):
                if not 0 < getattr(self, name) < math.inf:
                    raise UserError(f"--loss.{name} is {getattr(self, name)}, but must be above 0")

    config: Config

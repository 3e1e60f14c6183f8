"""Losses of preference optimization, as functions of log-probabilities.

`x` is the margin of a pair, the reward of its chosen answer minus the reward of its rejected
answer. The reward of an answer is beta times the logarithm of pi / pi_ref, its probability under
the trained model and under the reference; methods without a reference omit pi_ref, and SimPO and
ORPO divide the logarithm by the tokens of the answer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.components.losses.loss import Measures
from torchtitan.config import Configurable
from torchtitan.tools.errors import require

Kind = Literal["dpo", "cdpo", "robust", "hinge", "ipo", "dpo_normalized", "simpo", "orpo", "cpo"]


def dpo_loss(x: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return -log sigmoid(x) (Rafailov et al., arXiv:2305.18290, equation 7); with `smoothing`, its
    mean over labels that are wrong with this probability, which is cDPO (Mitchell, "A note on DPO
    with noisy preferences", 2023)."""
    return -(1 - smoothing) * F.logsigmoid(x) - smoothing * F.logsigmoid(-x)


def robust_loss(x: Tensor, smoothing: float) -> Tensor:
    """Return an estimate of DPO's loss on correct labels, if given ones are wrong with probability
    `smoothing` (Chowdhury et al., arXiv:2403.00409, equation 12)."""
    return (-(1 - smoothing) * F.logsigmoid(x) + smoothing * F.logsigmoid(-x)) / (1 - 2 * smoothing)


def hinge_loss(x: Tensor) -> Tensor:
    """Return max(0, 1 - x) (Zhao et al., arXiv:2305.10425)."""
    return torch.relu(1 - x)


def ipo_loss(h: Tensor, beta: float) -> Tensor:
    """Return (h - 1 / (2 beta))^2 (Azar et al., arXiv:2310.12036, equation 17); `h` is the
    difference of mean log-ratios per token, so that it does not depend on the length of answers."""
    return (h - 1 / (2 * beta)) ** 2


def orpo_loss(chosen: Tensor, rejected: Tensor, weight: float) -> Tensor:
    """Return the negative log-likelihood of the chosen answer plus `weight` times -log sigmoid(log
    odds ratio) (Hong et al., arXiv:2403.07691, equations 3 to 7). Both arguments are mean
    log-probabilities per token; one that rounds to 0 has the odds of the largest probability below
    1."""
    below_one = [mean.clamp(max=-torch.finfo(mean.dtype).eps) for mean in (chosen, rejected)]
    log_odds = [mean - torch.log(-torch.expm1(mean)) for mean in below_one]
    return -chosen - weight * F.logsigmoid(log_odds[0] - log_odds[1])


def cpo_loss(x: Tensor, chosen: Tensor, weight: float) -> Tensor:
    """Return -log sigmoid(x) minus `weight` times the chosen answer's mean log-probability per
    token (Xu et al., arXiv:2401.08417, equation 5, with the likelihood per token)."""
    return dpo_loss(x) - weight * chosen


def kto_loss(reward: Tensor, baseline: Tensor | float, is_desirable: Tensor) -> Tensor:
    """Return 1 - value of answers (Ethayarajh et al., arXiv:2402.01306, equation 8), before
    weights: the value is sigmoid(reward - baseline) for a desirable answer, sigmoid(baseline -
    reward) for another. The `baseline` is beta times the divergence of the model from the
    reference."""
    difference = reward - baseline
    return 1 - torch.sigmoid(torch.where(is_desirable, difference, -difference))


class PreferenceLoss(Configurable):
    """Loss and rewards of pairs."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Loss of pairs."""

        kind: Kind = "dpo"
        """Loss: dpo, cdpo and robust (for wrong labels), hinge, ipo, dpo_normalized (per token);
        without a reference simpo, orpo and cpo."""

        beta: float = 0.1
        """Scale of the rewards; a smaller value lets the model deviate further from the
        reference."""

        label_smoothing: float = 0.0
        """Probability that a label is wrong, below 0.5, for cdpo and robust."""

        gamma: float = 1.0
        """Target margin of simpo (Meng et al., arXiv:2405.14734, equation 6)."""

        weight: float = 1.0
        """Weight of the odds ratio in orpo, and of the likelihood in cpo."""

        def validate(self) -> None:
            smoothing = self.label_smoothing
            name = "--loss.label_smoothing"
            require(0 < self.beta < math.inf, "--loss.beta", self.beta, "above 0")
            require(0 <= smoothing < 0.5, name, smoothing, "from 0 to below 0.5")
            is_smoothed = self.kind in ("cdpo", "robust")
            needed = "above 0; dpo does not use it" if is_smoothed else "0; cdpo and robust use it"
            require(
                (smoothing > 0) == is_smoothed,
                f"--loss.kind {self.kind}: {name}",
                smoothing,
                needed,
            )

        @property
        def needs_reference(self) -> bool:
            return self.kind not in ("simpo", "orpo", "cpo")

    config: Config

    def __call__(self, log_ratios: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses (...) and rewards (..., 2) of pairs, from log(pi / pi_ref) and the number
        of tokens of chosen and rejected answers, (..., 2)."""
        config = self.config
        means = log_ratios / lengths.clamp(min=1)
        rewards = config.beta * (means if config.kind in ("simpo", "orpo") else log_ratios)
        x, h = (values[..., 0] - values[..., 1] for values in (rewards, means))
        losses: dict[Kind, Callable[[], Tensor]] = {
            "dpo": lambda: dpo_loss(x),
            "cdpo": lambda: dpo_loss(x, config.label_smoothing),
            "robust": lambda: robust_loss(x, config.label_smoothing),
            "hinge": lambda: hinge_loss(x),
            "ipo": lambda: ipo_loss(h, config.beta),
            "dpo_normalized": lambda: dpo_loss(config.beta * h),
            "simpo": lambda: dpo_loss(x - config.gamma),
            "orpo": lambda: orpo_loss(means[..., 0], means[..., 1], config.weight),
            "cpo": lambda: cpo_loss(x, means[..., 0], config.weight),
        }
        return losses[config.kind](), rewards


class KTOLoss(Configurable):
    """Loss and rewards of single answers with labels."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Loss of answers."""

        beta: float = 0.1
        """Scale of the rewards; a smaller value lets the model deviate further from the
        reference."""

        desirable_weight: float = 1.0
        """Weight of desirable answers."""

        undesirable_weight: float = 1.0
        """Weight of undesirable answers."""

        needs_reference = True

        def validate(self) -> None:
            for name in ("beta", "desirable_weight", "undesirable_weight"):
                value = getattr(self, name)
                require(0 < value < math.inf, f"--loss.{name}", value, "above 0")

    config: Config

    def __call__(self, log_ratios: Tensor, kl: Tensor) -> tuple[Tensor, Tensor]:
        """Return weighted losses and rewards, (..., 2), of desirable and undesirable answers from
        log(pi / pi_ref); `kl` is the divergence of the model from the reference."""
        config = self.config
        is_desirable = torch.tensor([True, False], device=log_ratios.device)
        weights = torch.where(is_desirable, config.desirable_weight, config.undesirable_weight)
        rewards = config.beta * log_ratios
        return weights * kto_loss(rewards, config.beta * kl, is_desirable), rewards


class RewardMeasures(Measures):
    """Means with `rewards/margins`, the mean reward of chosen minus of rejected answers."""

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        means = super().means(sums)
        rewards = [means[name] for name in ("rewards/chosen", "rewards/rejected") if name in means]
        return {**means, "rewards/margins": rewards[0] - rewards[1]} if len(rewards) == 2 else means

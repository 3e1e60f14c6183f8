"""Losses of preference optimization, as functions of log-probabilities.

`x` is the margin of a pair, the reward of its chosen answer minus the reward of its rejected
answer. The reward of an answer is beta times the logarithm of pi / pi_ref, its probability under
the trained model and under the reference; methods without a reference omit pi_ref, and SimPO and
ORPO divide the logarithm by the tokens of the answer. `KINDS` is the table of losses of pairs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.components.losses.loss import Measures
from torchtitan.config import Configurable
from torchtitan.tools.errors import UserError, require

Kind = Literal[
    "dpo",
    "cdpo",
    "robust",
    "hinge",
    "ipo",
    "dpo_normalized",
    "exo",
    "nca",
    "bco",
    "apo_zero",
    "apo_down",
    "sppo",
    "discopop",
    "aot",
    "aot_unpaired",
    "simpo",
    "orpo",
    "cpo",
    "sft",
    "mix",
]


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


def exo_loss(x: Tensor, smoothing: float) -> Tensor:
    """Return the divergence KL(q‖p) of the model's preference, q = sigmoid(x), from the smoothed
    label p = 1 - `smoothing` (EXO, Ji et al., arXiv:2402.00856, for two answers)."""
    chosen, rejected = F.logsigmoid(x), F.logsigmoid(-x)
    return torch.exp(chosen) * (chosen - math.log(1 - smoothing)) + torch.exp(rejected) * (
        rejected - math.log(smoothing)
    )


def nca_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return -log sigmoid(chosen) - (log sigmoid(-chosen) + log sigmoid(-rejected)) / 2 of rewards
    (NCA, Chen et al., arXiv:2402.05369, for two answers)."""
    return -F.logsigmoid(chosen) - (F.logsigmoid(-chosen) + F.logsigmoid(-rejected)) / 2


def bco_loss(chosen: Tensor, rejected: Tensor, shift: Tensor | float) -> Tensor:
    """Return -log sigmoid(chosen - shift) - log sigmoid(shift - rejected) of rewards (BCO, Jung et
    al., arXiv:2404.04656); `shift` is the mean of both kinds of rewards."""
    return -F.logsigmoid(chosen - shift) - F.logsigmoid(shift - rejected)


def apo_zero_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return -sigmoid(chosen) + sigmoid(rejected) + 1 of rewards: chosen answers become more
    probable, rejected ones less (APO-zero, D'Oosterlinck et al., arXiv:2408.06266)."""
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return sigmoid(chosen) - sigmoid(chosen - rejected) + 1 of rewards: both answers become less
    probable, the rejected ones more so (APO-down, arXiv:2408.06266)."""
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def sppo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return (chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2 of log-ratios, for answers
    that win and lose with certainty (SPPO, Wu et al., arXiv:2405.00675, with eta = 1 / beta)."""
    return (chosen - 1 / (2 * beta)) ** 2 + (rejected + 1 / (2 * beta)) ** 2


def discopop_loss(x: Tensor, temperature: float) -> Tensor:
    """Return a mean of the logistic and the exponential loss of a margin, -log sigmoid(x) and
    exp(-x); the second has the weight sigmoid(x / temperature) (DiscoPOP, Lu et al.,
    arXiv:2406.08414, the log-ratio modulated loss)."""
    exponential = torch.exp(F.logsigmoid(x / temperature) - x)  # exp(-x) alone would overflow
    return exponential - torch.sigmoid(-x / temperature) * F.logsigmoid(x)


def aot_loss(upper: Tensor, lower: Tensor, is_pair: Tensor, beta: float) -> Tensor:
    """Return -log sigmoid(beta (upper - lower)) of the values of all pairs in order of size, so
    that the distribution of `upper` comes to lie above that of `lower` (AOT, Melnyk et al.,
    arXiv:2406.05882, with the logistic loss); 0 without a pair. The n-th loss is of the
    n-th smallest values."""
    # Places without a pair come last. Shapes do not depend on values, which dry runs lack.
    uppers, lowers = (
        values.masked_fill(~is_pair, math.inf).flatten().sort().values for values in (upper, lower)
    )
    is_known = torch.arange(len(uppers), device=uppers.device) < is_pair.sum()
    gap = torch.where(is_known, uppers - lowers, 0.0)
    return torch.zeros_like(upper).masked_scatter(is_pair, -F.logsigmoid(beta * gap))


def kto_loss(reward: Tensor, baseline: Tensor | float, is_desirable: Tensor) -> Tensor:
    """Return 1 - value of answers (Ethayarajh et al., arXiv:2402.01306, equation 8), before
    weights: the value is sigmoid(reward - baseline) for a desirable answer, sigmoid(baseline -
    reward) for another. The `baseline` is beta times the divergence of the model from the
    reference."""
    difference = reward - baseline
    return 1 - torch.sigmoid(torch.where(is_desirable, difference, -difference))


class Answers(NamedTuple):
    """The answers of pairs, chosen and rejected, each (..., 2)."""

    log_probs: Tensor
    """Log-probabilities under the trained model."""
    reference: Tensor | float
    """Log-probabilities under the reference; 0 without one."""
    lengths: Tensor
    """Numbers of tokens, 0 for no answer."""

    @property
    def log_ratios(self) -> Tensor:
        return self.log_probs - self.reference

    @property
    def is_pair(self) -> Tensor:
        """True for a pair with both answers, (...)."""
        return (self.lengths > 0).all(dim=-1)

    def means(self, values: Tensor) -> Tensor:
        """Return values per token."""
        return values / self.lengths.clamp(min=1)


class PairLoss(NamedTuple):
    """A row of `KINDS`."""

    loss: Callable[[Answers, "PreferenceLoss.Config"], Tensor]
    """Losses of pairs, (...)."""
    needs_reference: bool = True
    is_smoothed: bool = False
    """Uses the probability of a wrong label."""
    per_token: bool = False
    """Compares rewards per token."""


def _sides(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of chosen and rejected answers, each (...)."""
    return values[..., 0], values[..., 1]


def _rewards(answers: Answers, config: "PreferenceLoss.Config") -> tuple[Tensor, Tensor]:
    return _sides(config.beta * answers.log_ratios)


def _margin(answers: Answers, config: "PreferenceLoss.Config") -> Tensor:
    chosen, rejected = _rewards(answers, config)
    return chosen - rejected


def _mean_margin(values: Tensor, answers: Answers) -> Tensor:
    """Return the difference of values per token, without beta."""
    chosen, rejected = _sides(answers.means(values))
    return chosen - rejected


def _bco(answers: Answers, config: "PreferenceLoss.Config") -> Tensor:
    chosen, rejected = _rewards(answers, config)
    is_pair = answers.is_pair
    total = ((chosen + rejected) * is_pair).sum() / 2
    return bco_loss(chosen, rejected, (total / is_pair.sum().clamp(min=1)).detach())


def _aot(answers: Answers, config: "PreferenceLoss.Config") -> Tensor:
    reference = torch.as_tensor(answers.reference).expand_as(answers.lengths)
    upper, lower = (x[..., 0] - x[..., 1] for x in (answers.log_probs, reference))
    return aot_loss(upper, lower, answers.is_pair, config.beta)


def _aot_unpaired(answers: Answers, config: "PreferenceLoss.Config") -> Tensor:
    return aot_loss(*_sides(answers.log_ratios), answers.is_pair, config.beta)


def _orpo(answers: Answers, config: "PreferenceLoss.Config") -> Tensor:
    return orpo_loss(*_sides(answers.means(answers.log_probs)), config.weight)


def _cpo(answers: Answers, config: "PreferenceLoss.Config") -> Tensor:
    chosen, rejected = _sides(answers.log_probs)
    likelihood = answers.means(answers.log_probs)[..., 0]
    return cpo_loss(config.beta * (chosen - rejected), likelihood, config.weight)


def _mixed(answers: Answers, config: "PreferenceLoss.Config") -> Tensor:
    losses = [weight * KINDS[kind].loss(answers, config) for kind, weight in config.parts.items()]
    return torch.stack(losses).sum(dim=0)


KINDS: Mapping[Kind, PairLoss] = {
    "dpo": PairLoss(lambda a, config: dpo_loss(_margin(a, config))),
    "cdpo": PairLoss(
        lambda a, config: dpo_loss(_margin(a, config), config.label_smoothing), is_smoothed=True
    ),
    "robust": PairLoss(
        lambda a, config: robust_loss(_margin(a, config), config.label_smoothing), is_smoothed=True
    ),
    "hinge": PairLoss(lambda a, config: hinge_loss(_margin(a, config))),
    "ipo": PairLoss(lambda a, config: ipo_loss(_mean_margin(a.log_ratios, a), config.beta)),
    "dpo_normalized": PairLoss(
        lambda a, config: dpo_loss(config.beta * _mean_margin(a.log_ratios, a))
    ),
    "exo": PairLoss(
        lambda a, config: exo_loss(_margin(a, config), config.label_smoothing), is_smoothed=True
    ),
    "nca": PairLoss(lambda a, config: nca_loss(*_rewards(a, config))),
    "bco": PairLoss(_bco),
    "apo_zero": PairLoss(lambda a, config: apo_zero_loss(*_rewards(a, config))),
    "apo_down": PairLoss(lambda a, config: apo_down_loss(*_rewards(a, config))),
    "sppo": PairLoss(lambda a, config: sppo_loss(*_sides(a.log_ratios), config.beta)),
    "discopop": PairLoss(lambda a, config: discopop_loss(_margin(a, config), config.temperature)),
    "aot": PairLoss(_aot),
    "aot_unpaired": PairLoss(_aot_unpaired),
    "simpo": PairLoss(
        lambda a, config: dpo_loss(config.beta * _mean_margin(a.log_probs, a) - config.gamma),
        needs_reference=False,
        per_token=True,
    ),
    "orpo": PairLoss(_orpo, needs_reference=False, per_token=True),
    "cpo": PairLoss(_cpo, needs_reference=False),
    "sft": PairLoss(lambda a, config: -a.means(a.log_probs)[..., 0], needs_reference=False),
    "mix": PairLoss(_mixed),
}


class PreferenceLoss(Configurable):
    """Loss and rewards of pairs."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Loss of pairs."""

        kind: Kind = "dpo"
        """Loss: dpo, cdpo and robust (for wrong labels), hinge, ipo, dpo_normalized (per token),
        exo, nca, bco, apo_zero, apo_down, sppo, discopop, aot, aot_unpaired; without a reference
        simpo, orpo, cpo and sft (the likelihood of chosen answers); mix for several."""

        mix: list[str] = field(default_factory=list)
        """Losses of kind mix and their weights, as KIND=WEIGHT: dpo=0.8 bco=0.2 sft=1 is MPO (Wang
        et al., arXiv:2411.10442)."""

        beta: float = 0.1
        """Scale of the rewards; a smaller value lets the model deviate further from the
        reference."""

        label_smoothing: float = 0.0
        """Probability that a label is wrong, below 0.5, for cdpo, robust and exo."""

        gamma: float = 1.0
        """Target margin of simpo (Meng et al., arXiv:2405.14734, equation 6)."""

        weight: float = 1.0
        """Weight of the odds ratio in orpo, and of the likelihood in cpo."""

        temperature: float = 0.05
        """Divisor of the margin in the weights of discopop's two losses."""

        verbose_weight: float = 1.0
        """Weight of an answer's tokens beyond the length of the pair's other answer, from 0 to 1; α
        in LD-DPO (Liu et al., arXiv:2409.06411)."""

        def validate(self) -> None:
            name = "--loss.label_smoothing"
            smoothing = self.label_smoothing
            require(0 < self.beta < math.inf, "--loss.beta", self.beta, "above 0")
            require(
                0 < self.temperature < math.inf, "--loss.temperature", self.temperature, "above 0"
            )
            alpha = self.verbose_weight
            require(0 <= alpha <= 1, "--loss.verbose_weight", alpha, "from 0 to 1")
            require(0 <= smoothing < 0.5, name, smoothing, "from 0 to below 0.5")
            is_smoothed = any(KINDS[kind].is_smoothed for kind in self.parts)
            users = ", ".join(kind for kind, row in KINDS.items() if row.is_smoothed)
            needed = "above 0; dpo does not use it" if is_smoothed else f"0; {users} use it"
            require(
                (smoothing > 0) == is_smoothed,
                f"--loss.kind {self.kind}: {name}",
                smoothing,
                needed,
            )

        @property
        def parts(self) -> dict[Kind, float]:
            """The losses with their weights. Raises `UserError` for a mixture that cannot be
            read."""
            if self.kind != "mix":
                require(not self.mix, "--loss.mix", self.mix, "empty without --loss.kind mix")
                return {self.kind: 1.0}
            known = [kind for kind in get_args(Kind) if kind != "mix"]
            parts: dict[Kind, float] = {}
            for part in self.mix:
                kind, _, text = part.partition("=")
                try:
                    weight = float(text)
                except ValueError:
                    weight = math.nan
                if kind not in known or kind in parts or not 0 < weight < math.inf:
                    raise UserError(
                        f"--loss.mix {part} is no KIND=WEIGHT with one of {', '.join(known)}, "
                        "each once, and a weight above 0"
                    )
                parts[cast(Kind, kind)] = weight
            require(bool(parts), "--loss.mix", self.mix, "KIND=WEIGHT ... for --loss.kind mix")
            return parts

        @property
        def needs_reference(self) -> bool:
            return any(KINDS[kind].needs_reference for kind in self.parts)

    config: Config

    @property
    def verbose_weight(self) -> float:
        """Weight of tokens beyond the length of the pair's other answer."""
        return self.config.verbose_weight

    def __call__(self, answers: Answers) -> tuple[Tensor, Tensor]:
        """Return losses (...) and rewards (..., 2) of pairs. `bco`, `aot` and `aot_unpaired`
        compare each pair with all others of the call."""
        config = self.config
        row = KINDS[config.kind]
        log_ratios = answers.log_ratios
        rewards = config.beta * (answers.means(log_ratios) if row.per_token else log_ratios)
        return row.loss(answers, config), rewards


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
    verbose_weight = 1.0

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

"""Policy-gradient losses as pure functions of log-probabilities, and `PolicyLoss`, which combines
them. Dimensions: P prompts, G samples of each, N sampled tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchtitan.config import Configurable
from torchtitan.config.sections import require_at_least
from torchtitan.tools.errors import require

KLEstimator = Literal["k1", "k2", "k3"]


class Method(NamedTuple):
    """Choices that distinguish the methods."""

    # `group_advantages`
    advantage: Literal["normalized", "centered", "leave_one_out", "critic"] = "normalized"
    # 1 / length of the sample, 1 / max_new_tokens, or 1
    token_weight: Literal["mean", "constant", "sum"] = "mean"
    # divide the sum by the tokens of the global batch instead of its samples
    per_token: bool = False
    sequence_ratio: bool = False  # clip the mean ratio of each sample instead of each token's ratio
    clip: tuple[float, float] = (0.2, 0.2)  # default bounds of the ratio, below and above 1
    resample: bool = False  # replace groups whose rewards are all equal


METHODS = {
    "grpo": Method(),  # arXiv:2402.03300, equation 3
    "dr_grpo": Method("centered", "constant"),  # arXiv:2503.20783, section 3.2
    # arXiv:2503.14476
    "dapo": Method(token_weight="sum", per_token=True, clip=(0.2, 0.28), resample=True),
    "rloo": Method("leave_one_out", "sum"),  # arXiv:2402.14740, section 3
    "gspo": Method(sequence_ratio=True, clip=(3e-4, 4e-4)),  # arXiv:2507.18071, equation 5
    "ppo": Method("critic", "sum", per_token=True),  # arXiv:1707.06347, equation 7
}


class PolicyLoss(Configurable):
    """Clipped policy-gradient loss of a batch whose samples have at most `max_new_tokens`
    tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Loss of the policy."""

        method: Literal["grpo", "dr_grpo", "dapo", "rloo", "gspo", "ppo"] = "grpo"
        """Method; see components.losses.policy_loss.METHODS."""

        clip_low: float | None = None
        """Largest distance of the ratio of probabilities below 1. None: the method's."""

        clip_high: float | None = None
        """Largest distance of the ratio of probabilities above 1. None: the method's."""

        beta: float = 0.0
        """Factor of the KL divergence from the reference; 0: without a reference."""

        kl: KLEstimator = "k3"
        """Estimator of the KL divergence."""

        max_log_ratio: float = 20.0
        """Largest logarithm of the ratio of probabilities: the loss of a less likely answer ends at
        exp(this) times its advantage, and the KL estimate k3 rises linearly beyond (two-sided
        clipping, arXiv:1912.09729, equation 5)."""

        max_importance_weight: float = 2.0
        """Maximum correction of a token for a difference between the sampler's probability and the
        trainer's."""

        value_weight: float = 0.1
        """Factor of the loss of the values (ppo)."""

        gae_decay: float = 0.95
        """Decay of later surprises in the advantage of a token, λ in GAE (ppo)."""

        updates: int = 1
        """Optimizer updates per step, all on the same samples."""

        def validate(self) -> None:
            require_at_least(1, policy__updates=self.updates)
            require(self.gae_decay <= 1, "--policy.gae_decay", self.gae_decay, "from 0 to 1")
            most = 80.0  # exp(88) is the largest number in float32
            require(
                0 < self.max_log_ratio <= most,
                "--policy.max_log_ratio",
                self.max_log_ratio,
                f"above 0 and at most {most:g}",
            )
            for name in (
                "clip_low",
                "clip_high",
                "beta",
                "max_importance_weight",
                "value_weight",
                "gae_decay",
            ):
                value = getattr(self, name)
                require(
                    value is None or 0 <= value < math.inf, f"--policy.{name}", value, "at least 0"
                )

    config: Config

    def __init__(self, config: Config, *, max_new_tokens: int):
        super().__init__(config)
        self.method, self.max_new_tokens = METHODS[config.method], max_new_tokens

    def __call__(
        self, log_probs_N: Tensor, tokens: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the summed loss, its weight (the number of samples, or of tokens), and measures of
        each token (N,). `tokens` has log-probabilities `old_logprobs` at the start of the step and
        `logprobs` of the sampler, `advantages`, and the numbers of their `samples`, each (N,). For
        a `beta` above 0, it has the log-probabilities of the `reference`; for a critic, its
        `values` in float32, `old_values` and `returns`."""
        config = self.config
        method = self.method
        old_N = tokens["old_logprobs"]
        samples_N = tokens["samples"]
        _, places_N, lengths = samples_N.unique(return_inverse=True, return_counts=True)
        log_ratio_N = log_probs_N - old_N
        if method.sequence_ratio:
            sums = log_ratio_N.new_zeros(len(lengths)).index_add(0, places_N, log_ratio_N)
            log_ratio_N = (sums / lengths)[places_N]
        low = method.clip[0] if config.clip_low is None else config.clip_low
        high = method.clip[1] if config.clip_high is None else config.clip_high
        advantages_N = tokens["advantages"]
        bound = config.max_log_ratio
        losses_N, is_clipped_N = clipped_losses(log_ratio_N, advantages_N, low, high, bound)
        importance_N = truncated_weights(old_N, tokens["logprobs"], config.max_importance_weight)
        losses_N = losses_N * importance_N
        measures = {
            "entropy": -log_probs_N,
            "clip_fraction": is_clipped_N,
            "importance_weight": importance_N,
            "bound_fraction": (log_ratio_N > bound) & (advantages_N < 0),
        }
        if "reference" in tokens:
            measures["kl"] = kl_estimates(log_probs_N, tokens["reference"], config.kl, bound)
            losses_N = losses_N + config.beta * measures["kl"]
        divisors = {"mean": lengths[places_N], "constant": self.max_new_tokens, "sum": 1}
        losses_N = losses_N / divisors[method.token_weight]
        if "values" in tokens:
            values, old, returns = (tokens[name] for name in ("values", "old_values", "returns"))
            measures["value_loss"] = clipped_value_losses(values, old, returns, high)
            losses_N = losses_N + config.value_weight * measures["value_loss"]
        counted = samples_N if method.per_token else lengths
        return losses_N.sum(), torch.ones_like(counted).sum(), measures


def group_advantages(rewards_PG: Tensor, kind: str = "normalized") -> Tensor:
    """Return how much better each sample is than its group: the reward minus the group's mean
    (centered), divided by the deviation plus 1e-4 (normalized), or minus the mean of the others
    (leave_one_out); the reward for a critic."""
    if kind == "critic":
        return rewards_PG
    centered_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    if kind == "normalized":
        return centered_PG / (rewards_PG.std(dim=1, keepdim=True) + 1e-4)
    if kind == "leave_one_out":
        size = rewards_PG.shape[1]
        return centered_PG * (size / (size - 1))
    return centered_PG


def generalized_advantages(
    rewards_N: Tensor, values_N: Tensor, samples_N: Tensor, decay: float
) -> Tensor:
    """Return the advantages (N,) of sampled tokens (GAE, arXiv:1506.02438, equation 16, without
    discount), float64: from the reward of each token's sample, received at its last token, the
    value of the state before each token, the number of each token's sample, whose tokens are
    neighbors, and λ."""
    advantages = []
    advantage = 0.0
    later = 0.0
    sample = None
    for reward, value, number in zip(
        *(x.flip(0).tolist() for x in (rewards_N, values_N, samples_N)), strict=True
    ):
        advantage = later - value + decay * advantage if number == sample else reward - value
        later, sample = value, number
        advantages.append(advantage)
    return torch.tensor(advantages, dtype=torch.float64).flip(0)


def clipped_losses(
    log_ratio_N: Tensor,
    advantages_N: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_log_ratio: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Return each token's loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r the ratio
    of the current to the old probability (PPO, arXiv:1707.06347, equation 7), and whether the
    clipping removed its gradient. The ratio is at most exp(max_log_ratio); beyond, the gradient of
    a negative advantage is also 0 (arXiv:1912.09729, equation 5)."""
    ratio_N = log_ratio_N.clamp(max=max_log_ratio).exp()
    losses_N = -ratio_N * advantages_N
    clipped_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return torch.maximum(losses_N, clipped_N), clipped_N > losses_N


def clipped_value_losses(
    values_N: Tensor, old_N: Tensor, returns_N: Tensor, clip: float = 0.2
) -> Tensor:
    """Return half the squared error of each value, or of the value at most `clip` from the old one,
    if it is larger (https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details, 9)."""
    clipped_N = old_N + (values_N - old_N).clamp(-clip, clip)
    return torch.maximum((values_N - returns_N).square(), (clipped_N - returns_N).square()) / 2


def kl_estimates(
    log_probs_N: Tensor, reference_N: Tensor, kind: KLEstimator = "k3", max_log_ratio: float = 20.0
) -> Tensor:
    """Return an estimate of the KL divergence from the reference for each token, with d =
    log(p_reference / p): k1 is -d, k2 is d² / 2, k3 is exp(d) - d - 1
    (http://joschu.net/blog/kl-approx.html). Above `max_log_ratio`, k3 continues along its tangent,
    so that it and its gradient are finite and keep their sign."""
    d_N = reference_N - log_probs_N
    if kind == "k1":
        return -d_N
    if kind == "k2":
        return d_N.square() / 2
    near_N = d_N.clamp(max=max_log_ratio)
    at_near_N = torch.expm1(near_N) - near_N  # does not cancel near 0
    slope = math.expm1(max_log_ratio)
    return at_near_N + slope * torch.relu(d_N - max_log_ratio)


def truncated_weights(old_N: Tensor, sampler_N: Tensor, most: float = 2.0) -> Tensor:
    """Return the importance weights min(p_old / p_sampler, most) of tokens that the sampler drew
    with a probability that differs from the trainer's; without gradients
    (https://fengyao.notion.site/off-policy-rl)."""
    return (old_N - sampler_N).detach().exp().clamp(max=most)

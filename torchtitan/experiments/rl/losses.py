"""Losses of policy-gradient methods: pure functions of log-probabilities and advantages of sampled tokens.

Dimensions: P prompts, G samples of each, N sampled tokens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class Method:
    """Choices in which the methods differ."""

    advantage: Literal["normalized", "centered", "leave_one_out"] = "normalized"
    """See `group_advantages`."""
    token_weight: Literal["mean", "constant", "sum"] = "mean"
    """Weight of a token in the sum of its sample: 1 / its length, 1 / max_new_tokens, or 1."""
    per_token: bool = False
    """Divide the sum by the tokens of the global batch instead of its samples."""
    sequence_ratio: bool = False
    """Clip the mean ratio of each sample instead of each token's ratio."""
    clip: tuple[float, float] = (0.2, 0.2)
    """Default bounds of the ratio, below and above 1."""
    resample: bool = False
    """Replace groups whose rewards are all equal."""


METHODS = {
    "grpo": Method(),  # arXiv:2402.03300, equation 3
    "dr_grpo": Method("centered", "constant"),  # arXiv:2503.20783, section 3.2
    "dapo": Method(token_weight="sum", per_token=True, clip=(0.2, 0.28), resample=True),  # arXiv:2503.14476
    "rloo": Method("leave_one_out", "sum"),  # arXiv:2402.14740, section 3
    "gspo": Method(sequence_ratio=True, clip=(3e-4, 4e-4)),  # arXiv:2507.18071, equation 5
}


def group_advantages(rewards_PG: Tensor, kind: str = "normalized") -> Tensor:
    """Return how much better each sample is than its group: the reward minus the group's mean (centered), divided by
    the standard deviation plus 1e-4 (normalized), or minus the mean of the other samples (leave_one_out)."""
    centered_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    if kind == "normalized":
        return centered_PG / (rewards_PG.std(dim=1, keepdim=True) + 1e-4)
    size = rewards_PG.shape[1]
    return centered_PG * (size / (size - 1)) if kind == "leave_one_out" else centered_PG


def clipped_losses(
    log_ratio_N: Tensor, advantages_N: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, Tensor]:
    """Return each token's loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r the ratio of the current to
    the old probability (PPO, arXiv:1707.06347, equation 7), and whether the clipping removed its gradient."""
    ratio_N = log_ratio_N.exp()
    losses_N = -ratio_N * advantages_N
    clipped_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return torch.maximum(losses_N, clipped_N), clipped_N > losses_N


def mean_by_sample(values_N: Tensor, samples_N: Tensor) -> Tensor:
    """Return for each token the mean over all tokens with the same sample number."""
    n_samples = int(samples_N.max()) + 1 if len(samples_N) else 0
    sums = values_N.new_zeros(n_samples).index_add(0, samples_N, values_N)
    return (sums / samples_N.bincount(minlength=n_samples).clamp(min=1))[samples_N]


def kl_estimates(log_probs_N: Tensor, reference_N: Tensor, kind: KLEstimator = "k3") -> Tensor:
    """Return an estimate of the KL divergence from the reference for each token, with d = log(p_reference / p): k1 is
    -d, k2 is d² / 2, k3 is exp(d) - d - 1 (http://joschu.net/blog/kl-approx.html)."""
    d_N = reference_N - log_probs_N
    return {"k1": lambda: -d_N, "k2": lambda: d_N.square() / 2, "k3": lambda: d_N.exp() - d_N - 1}[kind]()


def truncated_weights(old_N: Tensor, sampler_N: Tensor, most: float = 2.0) -> Tensor:
    """Return the importance weights min(p_old / p_sampler, most) of tokens that the sampler drew with a probability
    that differs from the trainer's; without gradients (https://fengyao.notion.site/off-policy-rl)."""
    return (old_N - sampler_N).detach().exp().clamp(max=most)

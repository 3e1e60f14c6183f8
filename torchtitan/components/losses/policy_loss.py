"""Policy-gradient losses as pure functions of log-probabilities, and `PolicyLoss`, which combines
them. Dimensions: P prompts, G samples of each, N sampled tokens."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchtitan.components.losses.entropy_control import EntropyControl
from torchtitan.components.losses.importance import Importance, importance_weights, sample_sums
from torchtitan.config import Configurable
from torchtitan.config.sections import require_at_least
from torchtitan.tools.errors import require

KLEstimator = Literal["k1", "k2", "k3", "unbiased"]
Advantage = Literal["normalized", "centered", "batch_scaled", "leave_one_out", "best"]
OF_TOKENS = ("returns", "critic")
"""Advantages that each token has of its own, from the rewards."""


class Ratios(NamedTuple):
    """Sampled tokens with the ratios of the current to the old probability."""

    log_ratio_N: Tensor
    log_probs_N: Tensor
    advantages_N: Tensor


class Clip(NamedTuple):
    """Bounds of the ratio: the largest distances below and above 1, and the largest logarithm."""

    low: float
    high: float
    max_log_ratio: float


TokenLoss = Callable[[Ratios, Clip], tuple[Tensor, Tensor]]
"""Returns the loss of each token, and whether the method's bounds changed its gradient, (N,)."""


def clipped(tokens: Ratios, clip: Clip) -> tuple[Tensor, Tensor]:
    """Return `clipped_losses` of tokens."""
    return clipped_losses(tokens.log_ratio_N, tokens.advantages_N, *clip)


def clipped_weights(tokens: Ratios, clip: Clip) -> tuple[Tensor, Tensor]:
    """Return -clip(r, 1 - low, 1 + high) A log p. No gradient passes through r, so that all tokens
    keep a gradient (CISPO, MiniMax-M1, arXiv:2506.13585, section 3.1)."""
    ratio_N = tokens.log_ratio_N.detach().clamp(max=clip.max_log_ratio).exp()
    weights_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    return -weights_N * tokens.advantages_N * tokens.log_probs_N, weights_N != ratio_N


def soft_gates(tokens: Ratios, clip: Clip) -> tuple[Tensor, Tensor]:
    """Return -4 / t sigmoid(t (r - 1)) A, with the temperature t: 1 for a positive advantage, 1.05
    for another. The gradient falls smoothly with the distance from 1 (SAPO, Gao et al.,
    arXiv:2511.20347)."""
    t_N = torch.where(tokens.advantages_N > 0, 1.0, 1.05)
    ratio_N = tokens.log_ratio_N.clamp(max=clip.max_log_ratio).exp()
    losses_N = -4 / t_N * torch.sigmoid(t_N * (ratio_N - 1)) * tokens.advantages_N
    return losses_N, torch.zeros_like(losses_N, dtype=torch.bool)


def gamma_weights(tokens: Ratios, clip: Clip) -> tuple[Tensor, Tensor]:
    """Return -W^k exp(c (1 - W)) A log p, where W is the ratio of a whole sample and no gradient
    passes through it; k and c are 2 and 3 for a positive advantage, 3 and 2 for another (VESPO,
    Shen et al., arXiv:2602.10693)."""
    is_positive_N = tokens.advantages_N > 0
    k_N, c_N = torch.where(is_positive_N, 2.0, 3.0), torch.where(is_positive_N, 3.0, 2.0)
    log_N = tokens.log_ratio_N.detach().clamp(-clip.max_log_ratio, clip.max_log_ratio)
    weights_N = (k_N * log_N + c_N * (1 - log_N.exp())).exp()
    losses_N = -weights_N * tokens.advantages_N * tokens.log_probs_N
    return losses_N, torch.zeros_like(losses_N, dtype=torch.bool)


def likelihoods(tokens: Ratios, clip: Clip) -> tuple[Tensor, Tensor]:
    """Return -A log p, whatever the ratio."""
    losses_N = -tokens.advantages_N * tokens.log_probs_N
    return losses_N, torch.zeros_like(losses_N, dtype=torch.bool)


class Method(NamedTuple):
    """Choices that distinguish the methods."""

    # `group_advantages`; returns: rewards minus `--policy.kl_in_reward` from each token on,
    # normalized over the tokens of the global batch; critic: the same, minus a critic's values
    advantage: Advantage | Literal["returns", "critic"] = "normalized"
    # 1 / length of the sample, 1 / max_new_tokens, or 1
    token_weight: Literal["mean", "constant", "sum"] = "mean"
    # divide the sum by the tokens of the global batch instead of its samples
    per_token: bool = False
    # of each token; of a sample: the mean, with gradients of all its tokens or of each token (once)
    # for itself, or the product
    ratio: Literal["token", "mean", "mean_of_token", "product"] = "token"
    clip: tuple[float, float] = (0.2, 0.2)  # default bounds of the ratio, below and above 1
    resample: bool = False  # replace groups whose rewards are all equal
    loss: TokenLoss = clipped


GSPO_CLIP = (3e-4, 4e-4)

METHODS = {
    "grpo": Method(),  # arXiv:2402.03300, equation 3
    "dr_grpo": Method("centered", "constant"),  # arXiv:2503.20783, section 3.2
    # arXiv:2503.14476
    "dapo": Method(token_weight="sum", per_token=True, clip=(0.2, 0.28), resample=True),
    "rloo": Method("leave_one_out", "sum"),  # arXiv:2402.14740, section 3
    "reinforce_pp": Method("returns", "sum", per_token=True),  # arXiv:2501.03262
    "gspo": Method(ratio="mean", clip=GSPO_CLIP),  # arXiv:2507.18071, equation 5
    "gspo_token": Method(ratio="mean_of_token", clip=GSPO_CLIP),  # the same, equation 13
    # arXiv:2602.05261: GSPO's loss of a sample times its length
    "luspo": Method(token_weight="sum", ratio="mean", clip=GSPO_CLIP),
    # arXiv:2506.13585; the upper bound 5 of the ratio is of ScaleRL, arXiv:2510.13786
    "cispo": Method(token_weight="sum", per_token=True, clip=(1.0, 4.0), loss=clipped_weights),
    "sapo": Method(loss=soft_gates),  # arXiv:2511.20347
    # arXiv:2602.10693
    "vespo": Method(token_weight="sum", per_token=True, ratio="product", loss=gamma_weights),
    "rejection": Method("best", loss=likelihoods),  # RAFT, arXiv:2304.06767
    "ppo": Method("critic", "sum", per_token=True),  # arXiv:1707.06347, equation 7
}


class PolicyLoss(Configurable):
    """Clipped policy-gradient loss of a batch whose samples have at most `max_new_tokens`
    tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Loss of the policy."""

        method: Literal[
            "grpo",
            "dr_grpo",
            "dapo",
            "rloo",
            "reinforce_pp",
            "gspo",
            "gspo_token",
            "luspo",
            "cispo",
            "sapo",
            "vespo",
            "rejection",
            "ppo",
        ] = "grpo"
        """Method; see components.losses.policy_loss.METHODS."""

        advantage: Advantage | None = None
        """Advantage of a sample: its reward minus the mean of its group (centered), divided by the
        group's deviation (normalized) or by the deviation of all the step's rewards (batch_scaled);
        minus the mean of the others (leave_one_out); or 1 for the best and 0 for the others (best).
        None: the method's; reinforce_pp and ppo have no other."""

        clip_low: float | None = None
        """Largest distance of the ratio of probabilities below 1. None: the method's."""

        clip_high: float | None = None
        """Largest distance of the ratio of probabilities above 1. None: the method's."""

        beta: float = 0.0
        """Factor of the KL divergence from the reference; 0: without a reference."""

        kl: KLEstimator = "k3"
        """Estimator of the KL divergence; unbiased: k3 times the token's ratio, whose gradient is
        unbiased (DeepSeek-V3.2, arXiv:2512.02556)."""

        kl_in_reward: bool = False
        """Subtract the divergence (k1) of each token from its reward instead of adding it to the
        loss (reinforce_pp, ppo)."""

        entropy_weight: float = 0.0
        """Factor of the mean entropy of a token's distribution, which the loss rewards."""

        entropy_target: float | None = None
        """Mean entropy of a token's distribution, in nats, that the loss holds: the factor, first
        entropy_weight, rises by entropy_step after each step below it, and falls after each step
        above it; while the entropy is above it, none is rewarded. The entropy of a step is the
        entropy of its last update. None: the factor is constant."""

        entropy_step: float = 0.005
        """Change of the factor in a step with entropy_target."""

        max_log_ratio: float = 20.0
        """Largest logarithm of the ratio of probabilities: the loss of a less likely answer ends at
        exp(this) times its advantage, and the KL estimate k3 rises linearly beyond (two-sided
        clipping, arXiv:1912.09729, equation 5)."""

        importance: Importance = "token"
        """Correction for a difference between the sampler's probabilities and the trainer's: their
        ratio for each token, or for a whole sequence; token_mask and sequence_mask exclude
        ratios above the maximum."""

        max_importance_weight: float = 2.0
        """Maximum of this correction."""

        value_weight: float = 0.1
        """Factor of the loss of the values (ppo)."""

        gae_decay: float = 0.95
        """Decay of later surprises in the advantage of a token, λ in GAE (ppo)."""

        replay_experts: bool = False
        """Train each token with the experts that it passed through when it was sampled (Rollout
        Routing Replay, arXiv:2510.11370)."""

        updates: int = 1
        """Passes over the samples of a step, each of `minibatches` optimizer updates."""

        minibatches: int = 1
        """Equal parts of a step's prompts, each for an optimizer update of its own."""

        def validate(self) -> None:
            require_at_least(1, policy__updates=self.updates, policy__minibatches=self.minibatches)
            require(
                self.entropy_step > 0 or self.entropy_target is None,
                "--policy.entropy_step",
                self.entropy_step,
                "above 0 with --policy.entropy_target",
            )
            takes_tokens = METHODS[self.method].advantage in OF_TOKENS
            users = "for --policy.method reinforce_pp and ppo"
            require(
                not self.kl_in_reward or (takes_tokens and self.beta > 0),
                "--policy.kl_in_reward",
                self.kl_in_reward,
                f"False, or with --policy.beta above 0 {users}, whose advantages are of tokens",
            )
            require(
                self.advantage is None or not takes_tokens,
                "--policy.advantage",
                self.advantage,
                f"unset {users}, whose advantages are of tokens",
            )
            require(self.gae_decay <= 1, "--policy.gae_decay", self.gae_decay, "from 0 to 1")
            # float32 ends at exp(88), and `unbiased` multiplies exp(this) by itself.
            most = 40.0
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
                "entropy_weight",
                "entropy_target",
                "entropy_step",
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
        method = METHODS[config.method]
        self.method = method._replace(advantage=config.advantage or method.advantage)
        self.max_new_tokens = max_new_tokens
        self.entropy = EntropyControl(
            config.entropy_weight, config.entropy_target, config.entropy_step
        )

    def __call__(
        self, log_probs_N: Tensor, tokens: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the summed loss, its weight (the number of samples, or of tokens), and measures of
        each token (N,). `tokens` has log-probabilities `old_logprobs` at the start of the step and
        `logprobs` of the sampler, `advantages`, and the numbers of their `samples`, each (N,). For
        a `beta` above 0, it has the log-probabilities of the `reference`; if `entropy` is on, the
        `entropies`; for a critic, its `values` in float32, `old_values` and
        `returns`."""
        config = self.config
        method = self.method
        old_N = tokens["old_logprobs"]
        samples_N = tokens["samples"]
        _, places_N, lengths = samples_N.unique(return_inverse=True, return_counts=True)
        token_ratio_N = log_probs_N - old_N
        log_ratio_N = sample_ratios(token_ratio_N, places_N, lengths, method.ratio)
        low = method.clip[0] if config.clip_low is None else config.clip_low
        high = method.clip[1] if config.clip_high is None else config.clip_high
        advantages_N = tokens["advantages"]
        bound = config.max_log_ratio
        losses_N, is_clipped_N = method.loss(
            Ratios(log_ratio_N, log_probs_N, advantages_N), Clip(low, high, bound)
        )
        sampler_N = tokens["logprobs"]
        importance_N, exceeds_N = importance_weights(
            old_N, sampler_N, places_N, config.importance, config.max_importance_weight
        )
        losses_N = losses_N * importance_N
        measures = {
            "entropy": -log_probs_N,
            "clip_fraction": is_clipped_N,
            "importance_weight": importance_N,
            "importance_cut": exceeds_N,
            "sampler_gap": (old_N - sampler_N).abs(),
            "bound_fraction": (log_ratio_N > bound) & (advantages_N < 0),
        }
        if "reference" in tokens:
            measures["kl"] = kl_estimates(log_probs_N, tokens["reference"], config.kl, bound)
            if config.kl == "unbiased":
                measures["kl"] = token_ratio_N.clamp(max=bound).exp() * measures["kl"]
            if not config.kl_in_reward:
                losses_N = losses_N + config.beta * measures["kl"]
        if "entropies" in tokens:
            measures["entropy"] = tokens["entropies"]
            losses_N = losses_N - self.entropy.factor * tokens["entropies"]
        divisors = {"mean": lengths[places_N], "constant": self.max_new_tokens, "sum": 1}
        losses_N = losses_N / divisors[method.token_weight]
        if "values" in tokens:
            values, old, returns = (tokens[name] for name in ("values", "old_values", "returns"))
            measures["value_loss"] = clipped_value_losses(values, old, returns, high)
            losses_N = losses_N + config.value_weight * measures["value_loss"]
        counted = samples_N if method.per_token else lengths
        return losses_N.sum(), torch.ones_like(counted).sum(), measures


def sample_ratios(log_ratio_N: Tensor, places_N: Tensor, lengths: Tensor, kind: str) -> Tensor:
    """Return the logarithms of the ratios that `Method.ratio` names, (N,), from the ratios of
    tokens, the place of each token's sample, and the lengths of the samples."""
    if kind == "token":
        return log_ratio_N
    sums_N = sample_sums(log_ratio_N, places_N)
    if kind == "product":
        return sums_N
    means_N = sums_N / lengths[places_N]
    if kind == "mean_of_token":
        return means_N.detach() + log_ratio_N - log_ratio_N.detach()
    return means_N


def group_advantages(
    rewards_PG: Tensor, kind: str = "normalized", deviation: float = 1.0
) -> Tensor:
    """Return how much better each sample is than its group: the reward minus the group's mean
    (centered), divided by the group's deviation plus 1e-4 (normalized) or by the given `deviation`
    of all rewards of the step plus 1e-4 (batch_scaled, arXiv:2508.08221), or minus the mean of the
    others (leave_one_out), each 0 for a single sample; 1 for the first of the best and 0 for the
    others (best); the reward for advantages of tokens."""
    if kind in OF_TOKENS:
        return rewards_PG
    if kind == "best":
        best_P1 = rewards_PG.argmax(dim=1, keepdim=True)
        return torch.zeros_like(rewards_PG).scatter(1, best_P1, 1.0)
    if rewards_PG.shape[1] < 2:  # nothing to compare with
        return torch.zeros_like(rewards_PG)
    centered_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    if kind == "normalized":
        return centered_PG / (rewards_PG.std(dim=1, keepdim=True) + 1e-4)
    if kind == "batch_scaled":
        return centered_PG / (deviation + 1e-4)
    if kind == "leave_one_out":
        size = rewards_PG.shape[1]
        return centered_PG * (size / (size - 1))
    return centered_PG


def generalized_advantages(
    rewards_N: Tensor,
    values_N: Tensor,
    samples_N: Tensor,
    decay: float,
    penalties_N: Tensor | None = None,
) -> Tensor:
    """Return the advantages (N,) of sampled tokens (GAE, arXiv:1506.02438, equation 16, without
    discount), float64: from the reward of each token's sample, received at its last token, the
    value of the state before each token, the number of each token's sample, whose tokens are
    neighbors, λ, and what each token's own reward is reduced by."""
    advantages = []
    penalties_N = torch.zeros_like(values_N) if penalties_N is None else penalties_N
    advantage = 0.0
    later = 0.0
    sample = None
    for reward, value, number, penalty in zip(
        *(x.flip(0).tolist() for x in (rewards_N, values_N, samples_N, penalties_N)), strict=True
    ):
        advantage = later - value + decay * advantage if number == sample else reward - value
        advantage -= penalty
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
    (http://joschu.net/blog/kl-approx.html); unbiased is k3, which the caller multiplies by the
    ratio. Above `max_log_ratio`, k3 continues along its tangent, so that it and its gradient are
    finite and keep their sign."""
    d_N = reference_N - log_probs_N
    if kind == "k1":
        return -d_N
    if kind == "k2":
        return d_N.square() / 2
    near_N = d_N.clamp(max=max_log_ratio)
    at_near_N = torch.expm1(near_N) - near_N  # does not cancel near 0
    slope = math.expm1(max_log_ratio)
    return at_near_N + slope * torch.relu(d_N - max_log_ratio)

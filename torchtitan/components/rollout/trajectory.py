"""Trajectories: tokens of a prompt, a model and its environment, with rewards."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from torchtitan.components.generation.experts import Experts
from torchtitan.components.images.files import ImageFile
from torchtitan.tools.errors import UserError

Overlong = Literal["mask", "penalty", "keep"]


@dataclass(slots=True)
class Trajectory:
    """Tokens of a prompt, the model and its environment, with a reward for the model's tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token when the model sampled it; any value for other tokens."""
    loss_mask: list[bool] = field(default_factory=list)
    """True for the tokens that the model sampled, which are trained."""
    reward: float | None = 0.0
    """Reward of the whole. None: no verdict; the trajectory is counted, but not trained."""
    images: Sequence[ImageFile] = ()
    """Images of the prompt at its beginning, which the trainer adds."""
    token_rewards: dict[int, float] = field(default_factory=dict)
    """Further rewards at places in `tokens`, for the sampled tokens up to them."""
    named: dict[str, float] = field(default_factory=dict)
    """Numbers that are logged; the trainer adds the results of reward functions."""
    is_overlong: bool = False
    """True if the context ended it."""
    versions: list[int] = field(default_factory=list)
    """With `--rollout.max_staleness`: for each sampled token, the step after which its weights were
    the run's, and -1 for other tokens. The trainer adds them."""
    experts: Experts | None = None
    """With `--policy.replay_experts`: the experts that each token passed through. The trainer adds
    them."""
    document: int = -1
    """Number of its prompt in the data, which the trainer sets."""
    n_reused: int = 0
    """Tokens of later turns that were not recomputed. The trainer adds them."""

    def append(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append tokens that the model sampled, or others, such as the prompt and the output of
        tools."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
        self.loss_mask += [logprobs is not None] * len(tokens)

    def reward_turn(self, reward: float) -> None:
        """Add a reward for what the model has sampled so far, at its last sampled token."""
        place = len(self.tokens) - 1 - self.loss_mask[::-1].index(True)
        self.token_rewards[place] = self.token_rewards.get(place, 0.0) + reward

    @property
    def n_prompt(self) -> int:
        """Number of tokens before the first one that the model sampled."""
        return [*self.loss_mask, True].index(True)

    @property
    def total(self) -> float | None:
        """Sum of all rewards; None without a verdict."""
        return None if self.reward is None else self.reward + sum(self.token_rewards.values())

    @property
    def trained(self) -> list[bool]:
        """`loss_mask`, or all false without a verdict."""
        return self.loss_mask if self.reward is not None else [False] * len(self.loss_mask)

    def cut(self, most: int) -> None:
        """Drop the tokens beyond `most`, and their rewards."""
        if len(self.tokens) > most:
            self.is_overlong = True
            for values in (self.tokens, self.logprobs, self.loss_mask, self.versions):
                del values[most:]
            self.experts = None if self.experts is None else self.experts[:most]
            self.token_rewards = {n: r for n, r in self.token_rewards.items() if n < most}

    def check(self, most: int) -> None:
        """Raise `UserError` if it cannot be trained, packed or logged, or has more than `most`
        tokens."""
        lengths = [len(self.tokens), len(self.logprobs), len(self.loss_mask)]
        rewards = [*self.token_rewards.values(), 0.0 if self.reward is None else self.reward]
        if (
            len(set(lengths)) > 1
            or lengths[0] < 2
            or not (any(self.loss_mask[1:]) or self.reward is None)
            or lengths[0] > most
            or not all(map(is_finite, rewards))
        ):
            found = (
                f"{lengths} tokens, logprobs and elements of loss_mask, {sum(self.loss_mask)} of "
                "them true"
            )
            needed = f"it needs equal numbers, from 2 to {most}, and a finite reward"
            raise UserError(f"a trajectory has {found}, and the reward {self.reward}; {needed}")
        for name, value in self.named.items():
            if not is_finite(value):
                raise UserError(
                    f"a trajectory names the number {name!r} {value!r:.60}, which must be finite"
                )
        unsampled = [n for n in self.token_rewards if not (0 <= n < lengths[0] and self.trained[n])]
        if unsampled and self.reward is not None:
            raise UserError(
                f"a trajectory has a reward at the token {unsampled[0]}, which the model did not "
                "sample; set it at a token whose loss_mask is true"
            )


def is_finite(value: object) -> bool:
    """Return whether a value is one finite number, of any type but text."""
    if isinstance(value, str | bytes):
        return False
    try:
        return math.isfinite(float(cast(Any, value)))
    except Exception:  # of any class, as the value
        return False


Group = list[Trajectory]  # of one prompt


def shape_overlong(
    trajectory: Trajectory, limit: int, kind: Overlong, buffer: int | None = None
) -> None:
    """Change the reward of a long trajectory, which the context may have ended.

    `mask` gives no verdict on these (DAPO's overlong filtering). `penalty` adds, with y tokens
    after the prompt, (limit - buffer - y) / buffer where this is between -1 and 0 (DAPO,
    arXiv:2503.14476, equation 13). `keep` changes nothing.

    Args:
        limit: maximum of y.
        buffer: None: a fifth of the limit.
    """
    if kind == "mask" and trajectory.is_overlong:
        trajectory.reward = None
    if kind == "penalty" and trajectory.reward is not None and any(trajectory.loss_mask):
        n_tokens = len(trajectory.tokens) - trajectory.n_prompt
        buffer = min(max(limit // 5, 1) if buffer is None else buffer, limit)
        penalty = max(-1.0, min(0.0, (limit - buffer - n_tokens) / buffer))
        penalty = -1.0 if trajectory.is_overlong else penalty
        trajectory.reward += penalty
        trajectory.named["overlong_penalty"] = penalty


Advantages = Callable[[Tensor], Tensor]
"""Advantages of rewards (P, G) within their groups, float64."""


def advantages_of(groups: Sequence[Group], of_groups: Advantages) -> list[float | list[float]]:
    """Return the advantage of each trajectory among the ones in its group with a verdict, and 0 for
    one without; for groups with rewards at tokens, return the advantage of each token.

    Rewards at tokens are compared with all others in the group, and the advantage of a token is the
    sum for the rewards at it and after it, plus the advantage of the whole trajectory
    (DeepSeekMath, arXiv:2402.03300, section 4.1.3)."""
    complete = [group for group in groups if all(t.reward is not None for t in group)]
    together: dict[int, list[float]] = {}
    if complete:
        rewards_PG = torch.tensor([[t.reward for t in g] for g in complete], dtype=torch.float64)
        values_PG = of_groups(rewards_PG).tolist()
        together = {id(group): values for group, values in zip(complete, values_PG, strict=True)}
    advantages: list[float | list[float]] = []
    for group in groups:
        whole = together.get(id(group)) or _of_judged(group, of_groups)
        if any(t.token_rewards for t in group):
            advantages += _with_token_rewards(group, whole, of_groups)
        else:
            advantages += whole
    return advantages


def _of_judged(group: Group, of_groups: Advantages) -> list[float]:
    """Return the advantages of a group in which some trajectories have no verdict."""
    found = iter(_compared([t.reward for t in group if t.reward is not None], of_groups))
    return [0.0 if t.reward is None else next(found) for t in group]


def _with_token_rewards(
    group: Group, whole: Sequence[float], of_groups: Advantages
) -> list[list[float]]:
    """Return the advantages of each token: its trajectory's, plus advantages for later rewards."""
    judged = [t for t in group if t.reward is not None]
    relative = iter(_compared([r for t in judged for r in t.token_rewards.values()], of_groups))
    advantages = []
    for trajectory, value in zip(group, whole, strict=True):
        values = [value] * len(trajectory.tokens)
        for place in trajectory.token_rewards if trajectory.reward is not None else ():
            reward = next(relative)
            values[: place + 1] = [earlier + reward for earlier in values[: place + 1]]
        advantages.append(values)
    return advantages


def _compared(rewards: Sequence[float], of_groups: Advantages) -> list[float]:
    """Return the advantages of rewards among each other."""
    if not rewards:
        return []
    values: list[float] = of_groups(torch.tensor([rewards], dtype=torch.float64))[0].tolist()
    return values

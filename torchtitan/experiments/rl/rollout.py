"""Rollouts: how a row of the data becomes a trajectory of tokens with a reward."""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from torchtitan.components.data.finetuning.functions import load_function
from torchtitan.components.data.plan.packing import first_fit_decreasing
from torchtitan.components.generation import Engine, Generation
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.experiments.rl.rewards import Rewards
from torchtitan.tools.errors import UserError


@dataclass(slots=True)
class Trajectory:
    """Tokens of a prompt, the model and its environment, with a reward for the model's tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token when the model sampled it; any value for other tokens."""
    loss_mask: list[bool] = field(default_factory=list)
    """True for the tokens that the model sampled, which are trained."""
    reward: float = 0.0

    def append(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append tokens that the model sampled, or others, such as the prompt and the output of tools."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
        self.loss_mask += [logprobs is not None] * len(tokens)

    def check(self, most: int) -> None:
        """Raise `UserError` for a trajectory that cannot be trained, or of more than `most` tokens."""
        lengths = [len(self.tokens), len(self.logprobs), len(self.loss_mask)]
        if len(set(lengths)) > 1 or not any(self.loss_mask[1:]) or lengths[0] > most or not math.isfinite(self.reward):
            raise UserError(
                f"a trajectory has {lengths} tokens, logprobs and elements of loss_mask, {sum(self.loss_mask)} of them "
                f"true, and the reward {self.reward}; it needs equal numbers, from 1 to {most}, and a finite reward"
            )


@dataclass
class RolloutEngine:
    """The parts that a rollout may use: the model, the tokenizer and the rewards."""

    engine: Engine
    tokenizer: Tokenizer
    rewards: Rewards
    prompt: list[int]
    """Token ids of the row's prompt, after the chat template."""
    max_new_tokens: int
    """Default and maximum of each continuation."""
    key: str
    """Seed of the rollout's random numbers."""
    where: str
    """Name of the row in messages."""
    n_calls: int = 0

    async def generate(self, tokens: Sequence[int], max_new_tokens: int | None = None) -> Generation:
        """Return a sampled continuation, which ends with the end of the turn or within the context."""
        most = min(max_new_tokens or self.max_new_tokens, self.max_new_tokens, self.engine.context - len(tokens))
        self.n_calls += 1
        return await self.engine.generate(tokens, max_new_tokens=max(most, 1), key=f"{self.key}/{self.n_calls}")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return text without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        """Return the sum of `--rewards` for a completion."""
        return self.rewards(self.decode(self.prompt), completion, row, self.where)


Rollout = Callable[[Mapping[str, Any], RolloutEngine], Awaitable[Trajectory]]
"""`async def rollout(row, engine) -> Trajectory`, with the row of the dataset. Many run at a time."""


async def single_turn(row: Mapping[str, Any], engine: RolloutEngine) -> Trajectory:
    """Answer the prompt once, and rate the answer by `--rewards`."""
    trajectory = Trajectory()
    trajectory.append(engine.prompt)
    answer = await engine.generate(engine.prompt)
    trajectory.append(answer.ids, answer.logprobs)
    trajectory.reward = engine.reward(engine.decode(answer.ids), row)
    return trajectory


def find_rollout(reference: str) -> Rollout:
    """Return the rollout of `--rollout.function`. Raise `UserError` if there is none."""
    function: Any = load_function(reference) if reference else single_turn
    if not inspect.iscoroutinefunction(function):
        raise UserError(f"--rollout.function {reference} must be defined as async def rollout(row, engine)")
    return cast(Rollout, function)


def pack_trajectories(samples: Sequence[tuple[Trajectory, float]], seq_len: int) -> list[dict[str, np.ndarray]]:
    """Pack trajectories, each with its advantage, into windows of `seq_len` tokens: `input`, `labels`, `positions`
    and, for each label, `logprobs` of the sampler, `advantages`, `lengths` (trained tokens of its trajectory) and
    `samples` (number of its trajectory)."""
    sizes = np.array([len(trajectory.tokens) - 1 for trajectory, _ in samples], np.int64)
    windows = []
    for numbers in first_fit_decreasing(sizes, seq_len):
        window, start = padding(seq_len), 0
        for number in numbers.tolist():
            trajectory, advantage = samples[number]
            span = slice(start, start := start + int(sizes[number]))
            trained = np.array(trajectory.loss_mask[1:])
            window["input"][span] = trajectory.tokens[:-1]
            window["labels"][span] = np.where(trained, trajectory.tokens[1:], IGNORE_INDEX)
            window["positions"][span] = np.arange(sizes[number])
            window["logprobs"][span], window["advantages"][span] = trajectory.logprobs[1:], advantage
            window["lengths"][span], window["samples"][span] = trained.sum(), number
        window["positions"][start:] = np.arange(seq_len - start)
        windows.append(window)
    return windows


def padding(seq_len: int) -> dict[str, np.ndarray]:
    """Return a window of padding: one document with ignored labels."""
    zeros = {name: np.zeros(seq_len, np.float32) for name in ("logprobs", "old_logprobs", "advantages")}
    numbers = {"input": 0, "labels": IGNORE_INDEX, "lengths": 1, "samples": 0}
    filled = {name: np.full(seq_len, number, np.int64) for name, number in numbers.items()}
    return {**zeros, **filled, "positions": np.arange(seq_len)}

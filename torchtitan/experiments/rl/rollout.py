"""Rollouts: how a row of the data becomes a trajectory of tokens with a reward."""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchtitan.components.data.base import Batch, to_batch
from torchtitan.components.data.finetuning.functions import load_function
from torchtitan.components.generation import Engine, Generation
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.experiments.rl.rewards import Rewards
from torchtitan.tools.errors import UserError


@dataclass(slots=True)
class Trajectory:
    """Tokens of a prompt, the model and its environment, with a reward for the model's tokens."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token when the model sampled it; any value for other tokens."""
    loss_mask: list[bool]
    """True for the tokens that the model sampled, which are trained."""
    reward: float

    @classmethod
    def start(cls, prompt: Sequence[int]) -> "Trajectory":
        """Return a trajectory of the tokens of a prompt, which are not trained."""
        return cls([], [], [], 0.0).extended(prompt)

    def extended(self, tokens: Sequence[int]) -> "Trajectory":
        """Append tokens that the model did not sample, such as a tool's output; return the trajectory."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.loss_mask += [False] * len(tokens)
        return self

    def append(self, generation: Generation) -> None:
        """Append the tokens that the model sampled."""
        self.tokens += generation.ids
        self.logprobs += generation.logprobs
        self.loss_mask += [True] * len(generation.ids)

    def check(self, most: int) -> None:
        """Raise `UserError` for a trajectory that cannot be trained, or of more than `most` tokens."""
        lengths = len(self.tokens), len(self.logprobs), len(self.loss_mask)
        if len(set(lengths)) > 1 or not any(self.loss_mask[1:]):
            raise UserError(
                f"a trajectory has {lengths[0]} tokens, {lengths[1]} logprobs and {lengths[2]} elements of loss_mask, "
                f"{sum(self.loss_mask[1:])} of them true; all three must be equally long, with a sampled token"
            )
        if lengths[0] > most:
            raise UserError(
                f"a trajectory of {lengths[0]} tokens exceeds {most} (--training.seq_len + 1); end it before"
            )
        if not math.isfinite(self.reward):
            raise UserError(f"a trajectory has the reward {self.reward}, but it must be finite")


class RolloutEngine:
    """What a rollout may use: the model, the tokenizer and the rewards.

    Args:
        prompt: token ids of the row's prompt, after the chat template.
        max_new_tokens: default and maximum of each continuation.
        key: seed of the rollout's random numbers.
        where: name of the row in messages.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        rewards: Rewards,
        *,
        prompt: list[int],
        max_new_tokens: int,
        key: str,
        where: str,
    ):
        self.tokenizer, self.prompt, self.max_new_tokens = tokenizer, prompt, max_new_tokens
        self._engine, self._rewards, self._key, self.where = engine, rewards, key, where
        self._n_calls = 0

    async def generate(self, tokens: Sequence[int], max_new_tokens: int | None = None) -> Generation:
        """Return a sampled continuation, which ends with the end of the turn or within the context."""
        most = min(max_new_tokens or self.max_new_tokens, self._engine.context - len(tokens))
        self._n_calls += 1
        key = f"{self._key}/{self._n_calls}"
        return await self._engine.generate(tokens, max_new_tokens=max(most, 1), key=key)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return text without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        """Return the sum of `--rewards` for a completion."""
        return self._rewards(self.decode(self.prompt), completion, row, self.where)


Rollout = Callable[[Mapping[str, Any], RolloutEngine], Awaitable[Trajectory]]
"""`async def rollout(row, engine) -> Trajectory`, with the row of the dataset. Many run at a time."""


async def single_turn(row: Mapping[str, Any], engine: RolloutEngine) -> Trajectory:
    """Answer the prompt once, and rate the answer by `--rewards`."""
    trajectory = Trajectory.start(engine.prompt)
    answer = await engine.generate(trajectory.tokens)
    trajectory.append(answer)
    trajectory.reward = engine.reward(engine.decode(answer.ids), row)
    return trajectory


def find_rollout(reference: str) -> Rollout:
    """Return the rollout `package.module:function` or `file.py:function`; by default `single_turn`. Raise `UserError`
    if there is none."""
    if not reference:
        return single_turn
    function: Any = load_function(reference)
    if not inspect.iscoroutinefunction(function):
        raise UserError(f"--rollout.function {reference} must be defined as async def rollout(row, engine)")
    rollout: Rollout = function
    return rollout


def pack_trajectories(samples: Sequence[tuple[Trajectory, float]], seq_len: int) -> list[dict[str, np.ndarray]]:
    """Pack trajectories, each with its advantage, into windows of `seq_len` tokens, first-fit-decreasing.

    Returns:
        windows with `input`, `labels`, `positions` and, for each label, `logprobs` of the sampler, `advantages`,
            `lengths` (trained tokens of its trajectory) and `samples` (number of its trajectory).
    """
    order = sorted(range(len(samples)), key=lambda index: -len(samples[index][0].tokens))
    windows: list[dict[str, np.ndarray]] = []
    used: list[int] = []
    for index in order:
        trajectory, advantage = samples[index]
        length = len(trajectory.tokens) - 1
        place = next((n for n, start in enumerate(used) if start + length <= seq_len), len(windows))
        if place == len(windows):
            windows.append(empty_window(seq_len))
            used.append(0)
        window, span = windows[place], slice(used[place], used[place] + length)
        trained = np.array(trajectory.loss_mask[1:])
        window["input"][span] = trajectory.tokens[:-1]
        window["labels"][span] = np.where(trained, trajectory.tokens[1:], IGNORE_INDEX)
        window["positions"][span] = np.arange(length)
        window["logprobs"][span] = trajectory.logprobs[1:]
        window["advantages"][span] = advantage
        window["lengths"][span] = trained.sum()
        window["samples"][span] = index
        used[place] += length
        window["positions"][used[place] :] = np.arange(seq_len - used[place])
    return windows


def empty_window(seq_len: int) -> dict[str, np.ndarray]:
    """Return a window of padding: one document with ignored labels."""
    integers = {name: np.zeros(seq_len, np.int64) for name in ("input", "samples")}
    floats = {name: np.zeros(seq_len, np.float32) for name in ("logprobs", "advantages")}
    lengths = np.ones(seq_len, np.int64)
    labels, positions = np.full(seq_len, IGNORE_INDEX, np.int64), np.arange(seq_len)
    return {**integers, **floats, "labels": labels, "lengths": lengths, "positions": positions}


def to_batches(windows: Sequence[dict[str, np.ndarray]], seq_len: int, size: int, n_batches: int) -> list[Batch]:
    """Return `n_batches` batches of `size` windows, the last ones filled with padding."""
    filled = [*windows, *(empty_window(seq_len) for _ in range(n_batches * size - len(windows)))]
    batches = [to_batch(filled[start : start + size]) for start in range(0, len(filled), size)]
    for batch in batches:
        batch["old_logprobs"] = torch.full_like(batch["logprobs"], math.nan)
    return batches

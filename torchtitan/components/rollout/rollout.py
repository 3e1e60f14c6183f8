"""Rollouts: how rows of the data become trajectories of tokens, sampled by the model and rated by
rewards."""

import inspect
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.chat_encoding import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.functions import load_function
from torchtitan.components.data.finetuning.samples import Windows, pack_windows
from torchtitan.components.data.plan.packing import first_fit_decreasing, no_packing
from torchtitan.components.generation import Engine, Generation
from torchtitan.components.images.files import ImageFile
from torchtitan.components.rollout.rewards import Rewards
from torchtitan.components.rollout.vllm import VLLMEngine
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config.code import CodeReference
from torchtitan.tools.errors import UserError, errors_of
from torchtitan.tools.logging import logger


@dataclass(slots=True)
class Trajectory:
    """Tokens of a prompt, the model and its environment, with a reward for the model's tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token when the model sampled it; any value for other tokens."""
    loss_mask: list[bool] = field(default_factory=list)
    """True for the tokens that the model sampled, which are trained."""
    reward: float = 0.0
    images: Sequence[ImageFile] = ()
    """Images of the prompt at its beginning, which the trainer adds."""

    def append(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append tokens that the model sampled, or others, such as the prompt and the output of
        tools."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
        self.loss_mask += [logprobs is not None] * len(tokens)

    def check(self, most: int) -> None:
        """Raise `UserError` if it cannot be trained, or has more than `most` tokens."""
        lengths = [len(self.tokens), len(self.logprobs), len(self.loss_mask)]
        if (
            len(set(lengths)) > 1
            or not any(self.loss_mask[1:])
            or lengths[0] > most
            or not math.isfinite(self.reward)
        ):
            found = (
                f"{lengths} tokens, logprobs and elements of loss_mask, {sum(self.loss_mask)} of "
                "them true"
            )
            needed = f"it needs equal numbers, from 1 to {most}, and a finite reward"
            raise UserError(f"a trajectory has {found}, and the reward {self.reward}; {needed}")


@dataclass
class RolloutEngine:
    """The parts that a rollout may use: the model, the tokenizer and the rewards."""

    engine: Engine | VLLMEngine
    """Samples by the current weights at temperature 1; another one has the same `context`,
    `generate` and `run`."""
    tokenizer: Tokenizer
    rewards: Rewards
    prompt: list[int]
    """Token ids of the row's prompt, after the chat template."""
    max_new_tokens: int
    """Default and maximum of each continuation."""
    key: str
    """Seed of the rollout's random numbers."""
    images: Sequence[ImageFile] = ()
    """Images of the prompt; `decode` of one returns its pixels."""
    n_calls: int = 0

    async def generate(
        self, tokens: Sequence[int], max_new_tokens: int | None = None
    ) -> Generation:
        """Return a sampled continuation, which ends with the end of the turn or within the
        context. Tokens that begin with the prompt have its images."""
        most = min(
            max_new_tokens or self.max_new_tokens,
            self.max_new_tokens,
            self.engine.context - len(tokens),
        )
        self.n_calls += 1
        images = self.images_of(tokens)
        more: dict[str, Any] = {"images": images} if images else {}
        return await self.engine.generate(
            tokens, max_new_tokens=max(most, 1), key=f"{self.key}/{self.n_calls}", **more
        )

    def images_of(self, tokens: Sequence[int]) -> Sequence[ImageFile]:
        """Return the images of a text: those of the prompt if it begins with it."""
        begins = list(tokens[: len(self.prompt)]) == self.prompt
        return self.images if begins else ()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return text without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        """Return the sum of `--rewards` for a completion."""
        return self.rewards(self.decode(self.prompt), completion, row)


Group = list[Trajectory]  # of one prompt
# of a row; many run at a time
Rollout = Callable[[Mapping[str, Any], RolloutEngine], Awaitable[Trajectory]]


async def single_turn(row: Mapping[str, Any], engine: RolloutEngine) -> Trajectory:
    """Answer the prompt once, and rate the answer by `--rewards`."""
    trajectory = Trajectory()
    trajectory.append(engine.prompt)
    answer = await engine.generate(engine.prompt)
    trajectory.append(answer.ids, answer.logprobs)
    trajectory.reward = engine.reward(engine.decode(answer.ids), row)
    return trajectory


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """Sampling of trajectories, at temperature 1."""

    function: CodeReference = ""
    """Rollout, package.module:function or file.py:function. Empty: one answer, rated by the
    rewards."""

    group_size: int = 8
    """Trajectories per prompt."""

    max_new_tokens: int = 256
    """Maximum tokens of an answer."""

    max_rows: int = 64
    """Texts that a rank generates at a time; a finished one makes room for the next."""

    engine: Literal["embedded", "vllm"] = "embedded"
    """embedded: the run's own weights; vllm: a server, which gets the weights before each step."""

    url: str = "http://localhost:8000"
    """Server of the engine vllm."""

    def find_function(self) -> Rollout:
        """Return the rollout. Raise `UserError` if the function does not exist or is not
        asynchronous."""
        with errors_of("--rollout.function"):
            function: Any = load_function(self.function) if self.function else single_turn
            if not inspect.iscoroutinefunction(function):
                raise UserError(
                    f"{self.function} must be defined as async def rollout(row, engine)"
                )
        return cast(Rollout, function)


def log_completions(
    step: int, groups: Iterable[Group], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Log the first two trajectories of a step, and return them as lines of `completions.jsonl`."""
    lines = []
    for trajectory in itertools.islice(itertools.chain(*groups), 2):
        start = trajectory.loss_mask.index(True)
        prompt, completion = map(
            tokenizer.decode, (trajectory.tokens[:start], trajectory.tokens[start:])
        )
        logger.info("reward %.3f: %r -> %r", trajectory.reward, prompt[-200:], completion[:400])
        texts = {"prompt": prompt, "completion": completion}
        lines.append(
            {"step": step, "reward": trajectory.reward, "tokens": trajectory.tokens, **texts}
        )
    return lines


def to_batches(
    samples: Sequence[tuple[Trajectory, float]],
    seq_len: int,
    batch_size: int,
    ranks: Ranks,
    *,
    packs: bool = True,
    make_batch: Callable[[Windows, int], Batch] = pack_windows,
) -> list[Batch]:
    """Make batches of trajectories and their advantages, equally many on each rank. Labels also
    have `logprobs` of the sampler, `old_logprobs` (0), `advantages`, and trajectory numbers,
    `samples`.

    Args:
        seq_len: positions of a window at most.
        packs: pack trajectories into windows; otherwise each has one of its own.
        make_batch: makes a batch of the trajectories in its windows, whose positions follow one
            another.
    """
    lengths = np.array([len(t.tokens) - 1 for t, _ in samples], np.int64)
    packed: list[Any]
    if packs:
        packed = first_fit_decreasing(lengths, seq_len)
    else:
        order = np.argsort(-lengths, kind="stable")  # so that the rows of a batch are similar
        packed = [order[window] for window in no_packing(lengths[order], seq_len)]
    n_windows = batch_size * max(ranks.gather(-(-len(packed) // batch_size)))
    windows = [*packed, *[[]] * (n_windows - len(packed))]
    return [
        _batch_of(samples, windows[start : start + batch_size], seq_len, make_batch)
        for start in range(0, n_windows, batch_size)
    ]


def _batch_of(
    samples: Sequence[tuple[Trajectory, float]],
    windows: Sequence[Sequence[int]],
    seq_len: int,
    make_batch: Callable[[Windows, int], Batch],
) -> Batch:
    """Return a batch of windows with these numbers of samples; see `to_batches`."""
    batch = make_batch([[_row_of(samples[n][0]) for n in window] for window in windows], seq_len)
    length = batch["input"].shape[1]
    columns: dict[str, list[np.ndarray]] = {"logprobs": [], "advantages": [], "samples": []}
    for window in windows:
        chosen = [samples[number] for number in window]
        n_labels = [len(trajectory.tokens) - 1 for trajectory, _ in chosen]
        values: dict[str, Any] = {
            "logprobs": [logprob for t, _ in chosen for logprob in t.logprobs[1:]],
            "advantages": np.repeat([advantage for _, advantage in chosen], n_labels),
            "samples": np.repeat(np.array(window, np.int64), n_labels),
        }
        for name, column in columns.items():
            kind = np.int64 if name == "samples" else np.float32
            row = np.zeros(length, kind)
            row[: len(values[name])] = values[name]
            column.append(row)
    batch |= {name: torch.from_numpy(np.stack(rows)) for name, rows in columns.items()}
    return {**batch, "old_logprobs": torch.zeros_like(batch["logprobs"])}


def _row_of(trajectory: Trajectory) -> EncodedRow:
    sample = EncodedSample(np.array(trajectory.tokens), np.array(trajectory.loss_mask))
    return EncodedRow((sample,), images=[image.to_json() for image in trajectory.images])

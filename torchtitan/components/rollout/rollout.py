"""Rollouts: how rows of the data become trajectories of tokens, sampled by the model and rated by
rewards."""

import inspect
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

from torchtitan.components.data.finetuning.functions import load_member
from torchtitan.components.generation import Engine, Generation, Sampling, TextWriter
from torchtitan.components.generation.experts import Experts, merged_experts
from torchtitan.components.images.files import ImageFile
from torchtitan.components.rollout.chat import Chat, Message, Reply, Tools
from torchtitan.components.rollout.environment import (
    Environment,
    checked_step,
    messages_of,
    result_of,
)
from torchtitan.components.rollout.rewards import Rating, Rewards, Text
from torchtitan.components.rollout.trajectory import Group, Overlong, Trajectory
from torchtitan.components.rollout.vllm import VLLMEngine
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config.code import CodeReference
from torchtitan.tools.errors import UserError, errors_of, require
from torchtitan.tools.logging import logger


class ContextFull(Exception):
    """The context has no room for another token of a rollout. If it does not catch this error, its
    trajectory consists of `tokens`, the text so far, with the reward 0."""

    def __init__(self, tokens: Sequence[int], context: int):
        super().__init__(f"{len(tokens)} tokens fill the context of {context}")
        self.tokens = list(tokens)


@dataclass
class RolloutEngine:
    """The parts that a rollout may use: the model, the tokenizer, the chat template and the
    rewards."""

    engine: Engine | VLLMEngine
    """Samples by the current weights; another one has the same `context`, `generate` and `run`."""
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
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    """Settings of `--rollout`."""
    chat: Chat | None = None
    """The chat template, or None."""
    n_calls: int = 0
    is_full: bool = False
    """True if the context has ended a continuation."""
    rating: Rating = field(default_factory=Rating)
    """Numbers of the last `rate`."""
    to_rate: Text | None = None
    """Text of the last `rate`, for functions that rate a whole batch."""
    sampled: list[tuple[list[int], Generation]] = field(default_factory=list)
    """All continuations, each with the tokens before it."""

    async def generate(
        self,
        tokens: Sequence[int],
        max_new_tokens: int | None = None,
        *,
        stop: Sequence[str] = (),
        is_continued: bool = False,
        **settings: Any,
    ) -> Generation:
        """Return a sampled continuation, which ends with the end of the turn or within the context;
        `logprobs` are of the distribution that was sampled from. Tokens that begin with the
        prompt have its images. Raise `ContextFull` if no token fits.

        Args:
            stop: texts that end the continuation, which includes them.
            is_continued: whether a later call begins with these tokens and the continuation, so
                that only the tokens after them must be computed (see `Engine.generate`).
            settings: temperature, top_k, top_p and min_p, instead of the values of `--rollout`.
        """
        room = self.engine.context - len(tokens)
        if room < 1:
            self.is_full = True
            raise ContextFull(tokens, self.engine.context)
        wanted = min(max_new_tokens or self.max_new_tokens, self.max_new_tokens)
        self.n_calls += 1
        images = self.images_of(tokens)
        more: dict[str, Any] = {"images": images} if images else {}
        if settings:
            more["sampling"] = replace(self.sampling, **settings)
        if stop:
            more |= self._stops(tokens, stop)
        if isinstance(self.engine, Engine):
            more["is_continued"] = is_continued
        generation = await self.engine.generate(
            tokens, max_new_tokens=min(wanted, room), key=f"{self.key}/{self.n_calls}", **more
        )
        self.is_full |= room < wanted and generation.finish_reason == "length"
        self.sampled.append((list(tokens), generation))
        return generation

    def _stops(self, tokens: Sequence[int], stop: Sequence[str]) -> dict[str, object]:
        if not isinstance(self.engine, Engine):
            return {"stop": list(stop)}
        kept = self.chat.kept if self.chat else {}
        return {"on_token": TextWriter(self.tokenizer, tokens, stop, kept).ends_with}

    def images_of(self, tokens: Sequence[int]) -> Sequence[ImageFile]:
        """Return the images of a text: the prompt's images if it begins with the prompt."""
        begins = list(tokens[: len(self.prompt)]) == self.prompt
        return self.images if begins else ()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return text without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def encode(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the tokens of a conversation up to the model's turn; see `Chat.encode`."""
        return self._chat.encode(messages, tools)

    def read(self, turn: Generation, tools: Tools = ()) -> Reply:
        """Return content, reasoning and calls of a continuation; see `Chat.read`."""
        before = next((tokens for tokens, other in self.sampled if other is turn), [])
        return self._chat.read(before, turn.ids, tools)

    def following(
        self, turn: Generation, messages: Sequence[Message], tools: Tools = ()
    ) -> list[int]:
        """Return the tokens from a continuation to the model's next turn; see `Chat.following`."""
        return self._chat.following(turn.ids, messages, tools)

    @property
    def stop_texts(self) -> Sequence[str]:
        """Texts that end a turn because the chat template has no token for it."""
        return self.chat.stop_texts if self.chat else ()

    @property
    def _chat(self) -> Chat:
        if self.chat is None:
            raise UserError("the rollouts have no chat template; set --dataloader.chat_template")
        return self.chat

    def reward(self, completion: str, row: Mapping[str, object]) -> float | None:
        """Return the sum of `--rewards` for a completion; None without a verdict. Raise `UserError`
        if one of the rewards must be awaited; `rate` awaits rewards."""
        self.rating = self.rewards.rated_now(self.decode(self.prompt), completion, row, self.images)
        return self.rating.value

    async def rate(self, completion: str, row: Mapping[str, object]) -> float | None:
        """Return what `reward` returns. Functions may be asynchronous. If some rate a whole batch,
        return the sum of the others, 0 without a verdict: `add_rating` adds the rest when all
        rollouts have ended."""
        self.to_rate = Text(self.decode(self.prompt), completion, row, self.images)
        self.rating = await self.rewards.rate(*self.to_rate)
        is_complete = not self.rewards.has_batch_functions
        return self.rating.value if is_complete else self.rating.value or 0.0

    def add_rating(self, trajectory: Trajectory, rating: Rating) -> None:
        """Add the rating of the last `rate` by functions of a whole batch. The trajectory has no
        verdict if no function has one, or if the rollout has set none."""
        trajectory.named |= rating.named
        if rating.value is None and self.rating.value is None:
            trajectory.reward = None
        if trajectory.reward is not None:
            trajectory.reward += rating.value or 0.0

    def trajectory_of(self, tokens: Sequence[int]) -> Trajectory:
        """Return a trajectory of a text that trains the continuations so far, with the reward 0, or
        without a verdict if it has no continuation."""
        trajectory = Trajectory()
        trajectory.append(tokens)
        for place, generation in self._sampled_in(tokens):
            trajectory.logprobs[place] = generation.logprobs
            trajectory.loss_mask[place] = [True] * len(generation.ids)
        if not any(trajectory.loss_mask):
            trajectory.reward = None
        return trajectory

    def versions_of(self, trajectory: Trajectory) -> list[int]:
        """Return `Trajectory.versions`. A sampled token that is not where the engine has sampled
        it, since the rollout has changed the text, has the oldest version of the rollout."""
        every = itertools.chain(*(generation.versions for _, generation in self.sampled))
        oldest = min(every, default=-1)
        versions = [oldest] * len(trajectory.tokens)
        for place, generation in self._sampled_in(trajectory.tokens):
            versions[place] = generation.versions
        return [
            version if is_sampled else -1
            for version, is_sampled in zip(versions, trajectory.loss_mask, strict=False)
        ]

    def experts_of(self, trajectory: Trajectory) -> Experts | None:
        """Return `Trajectory.experts`. They are unknown after the tokens that the engine has
        computed in this order, such as in a text that the rollout has changed."""
        texts = [(place.stop, turn) for place, turn in self._sampled_in(trajectory.tokens)]
        return merged_experts(len(trajectory.tokens), texts)

    def _sampled_in(self, tokens: Sequence[int]) -> Iterator[tuple[slice, Generation]]:
        """Yield the continuations that a text contains, with their places."""
        for before, generation in self.sampled:
            start, end = len(before), len(before) + len(generation.ids)
            if list(tokens[:end]) == [*before, *generation.ids]:
                yield slice(start, end), generation


# of a row; many run at a time
Rollout = Callable[[Mapping[str, object], RolloutEngine], Awaitable[Trajectory]]


async def single_turn(row: Mapping[str, object], engine: RolloutEngine) -> Trajectory:
    """Answer the prompt once, and rate the answer by `--rewards`."""
    trajectory = Trajectory()
    trajectory.append(engine.prompt)
    answer = await engine.generate(engine.prompt)
    trajectory.append(answer.ids, answer.logprobs)
    trajectory.reward = await engine.rate(engine.decode(answer.ids), row)
    return trajectory


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """Sampling of trajectories."""

    function: CodeReference = ""
    """Rollout, package.module:function or file.py:function, or a class of Environment. Empty: one
    answer, rated by the rewards."""

    group_size: int = 8
    """Trajectories per prompt."""

    max_new_tokens: int = 256
    """Maximum tokens of an answer."""

    max_rows: int = 64
    """Texts that a rank generates at a time; a finished one makes room for the next."""

    temperature: float = 1.0
    """Divisor of the logits when sampling; in reinforcement learning, also in the trained
    probabilities."""

    top_k: int | None = None
    """Number of most probable tokens to sample from; None: all."""

    top_p: float | None = None
    """Sample from the smallest set of most probable tokens with this total probability; None:
    all."""

    min_p: float | None = None
    """Sample only from tokens with at least this share of the largest probability; None: all."""

    max_staleness: int = 0
    """Steps by which the weights that sample a token may be older than the weights that are trained
    on it: rollouts of this number of later steps run during a step and its update. 0: each step
    samples all of its trajectories from the current weights."""

    overlong: Overlong = "mask"
    """Trajectories that the context ends: mask: not trained; penalty: trained, with a reward that
    falls by up to 1 in the last tokens before the limit; keep: trained as they are."""

    overlong_buffer: int | None = None
    """Tokens before the limit in which the penalty rises; None: a fifth of the limit."""

    engine: Literal["embedded", "vllm"] = "embedded"
    """embedded: the run's own weights; vllm: a server, which gets the weights before each step."""

    url: str = "http://localhost:8000"
    """Server of the engine vllm."""

    @property
    def sampling(self) -> Sampling:
        """Settings of sampling."""
        return Sampling(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )

    def validate(self) -> None:
        """Raise `UserError` for settings that cannot be trained with."""
        require(
            0 < self.temperature < math.inf,
            "--rollout.temperature",
            self.temperature,
            "above 0, since the most probable token gives no signal",
        )
        with errors_of("--rollout"):
            self.sampling.validate()
        n_steps = self.max_staleness
        require(n_steps >= 0, "--rollout.max_staleness", n_steps, "at least 0")
        buffer = self.overlong_buffer
        require(buffer is None or buffer >= 1, "--rollout.overlong_buffer", buffer, "at least 1")

    def require_current(self, user: str, why: str) -> None:
        """Raise `UserError` if tokens may be sampled from older weights."""
        least = f"0 with {user}, {why}"
        require(self.max_staleness == 0, "--rollout.max_staleness", self.max_staleness, least)

    def find_function(self) -> Rollout:
        """Return the rollout. Raise `UserError` if the function does not exist or is not
        asynchronous."""
        if not self.function:
            return single_turn
        with errors_of("--rollout.function"):
            found = load_member(self.function, _is_rollout)
            if inspect.isclass(found):
                if not issubclass(found, Environment):
                    raise UserError(
                        f"{self.function} is a class, but not a subclass of "
                        "torchtitan.components.rollout.Environment"
                    )
                return partial(play, found)
            if not inspect.iscoroutinefunction(found):
                raise UserError(
                    f"{self.function} must be defined as async def rollout(row, engine)"
                )
        return cast(Rollout, found)


def _is_rollout(member: object) -> bool:
    return inspect.isfunction(member) or inspect.isclass(member)


async def play(
    environment_class: type[Environment], row: Mapping[str, object], engine: RolloutEngine
) -> Trajectory:
    """Run the model in an environment until it ends, and rate all texts by `--rewards`, if
    there are any. Without a turn of the model, since the first messages fill the context, there is
    no verdict."""
    environment = environment_class()
    trajectory = Trajectory()
    try:
        reward = trajectory.reward = await _play(environment, row, engine, trajectory)
    finally:
        await result_of(environment.close())
    if not any(trajectory.loss_mask):
        trajectory.reward = None
    elif engine.rewards.names:
        text = engine.decode(trajectory.tokens[trajectory.n_prompt :])
        rated = await engine.rate(text, row)
        trajectory.reward = None if rated is None or reward is None else reward + rated
    return trajectory


async def _play(
    environment: Environment,
    row: Mapping[str, object],
    engine: RolloutEngine,
    trajectory: Trajectory,
) -> float | None:
    """Append the tokens of all turns, and return the reward of the whole; None without a
    verdict."""
    name = type(environment).__name__
    beginning = messages_of(await result_of(environment.reset(row)))
    tools = environment.tools
    if tools and not beginning:
        raise UserError(
            f"{name}.reset returned no messages, but it has tools, which the "
            "template writes with the first ones; return the prompt's messages"
        )
    trajectory.append(engine.encode(beginning, tools) if beginning else engine.prompt)
    reward, has_verdict = 0.0, True
    for number in range(environment.max_turns):
        try:
            turn = await engine.generate(
                trajectory.tokens,
                stop=engine.stop_texts,
                is_continued=number + 1 < environment.max_turns,
            )
        except ContextFull:
            break
        trajectory.append(turn.ids, turn.logprobs)
        result = await result_of(environment.step(engine.read(turn, tools)))
        step = checked_step(result, name)
        if step.reward is None:
            has_verdict = False
        elif environment.rewards_per_turn:
            trajectory.reward_turn(float(step.reward))
        else:
            reward += float(step.reward)
        trajectory.named |= step.named
        if step.is_done or number + 1 == environment.max_turns:
            break
        messages = messages_of(step.message)
        if any(message["role"] == "assistant" for message in messages):
            raise UserError(
                f"{name}.step returned a message of the assistant; return only what follows the "
                "model's turn, which stays as it was sampled"
            )
        trajectory.append(engine.following(turn, messages, tools))
    return reward if has_verdict else None


def log_completions(
    step: int, groups: Iterable[Group], tokenizer: Tokenizer
) -> list[dict[str, object]]:
    """Log the first two trajectories of a step, and return them as lines of `completions.jsonl`,
    with `Trajectory.versions` if there are any."""
    lines: list[dict[str, object]] = []
    for trajectory in itertools.islice(itertools.chain(*groups), 2):
        start = trajectory.n_prompt
        prompt, completion = map(
            tokenizer.decode, (trajectory.tokens[:start], trajectory.tokens[start:])
        )
        reward = trajectory.total
        shown = "none" if reward is None else f"{reward:.3f}"
        logger.info("reward %s: %r -> %r", shown, prompt[-200:], completion[:400])
        texts = {"prompt": prompt, "completion": completion}
        versions = {"versions": trajectory.versions} if trajectory.versions else {}
        lines.append(
            {"step": step, "reward": reward, "tokens": trajectory.tokens, **texts, **versions}
        )
    return lines
